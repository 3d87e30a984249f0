"""Matrix products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jq.arithmetic import layout
from jq.ops.convolutions import activate, at_places, sum_type, wide
from jq.ops.integer.fixed import Fixed
from jq.ops.integer.products import products
from jq.ops.table import Array, IntegerContext, Linear, Product, Quant, integer, namespace, op


def _gemm_summed(attrs: Mapping[str, Any], index: int) -> int:
    if index > 1:
        return -1
    return int(bool(attrs.get("transB" if index else "transA", 0)) == bool(index))


def _gemm_rows(a: Array, b: Array, attrs: Mapping[str, Any], places: np.ndarray | None) -> Array:
    return attrs.get("alpha", 1.0) * (a.T if attrs.get("transA", 0) else a)[..., None]


def _gemm_columns(b: Array, attrs: Mapping[str, Any]) -> Array:
    return (b.T if attrs.get("transB", 0) else b)[None]


def _gemm_weights(columns: Array, shape: Sequence[int], attrs: Mapping[str, Any]) -> Array:
    return columns[0].T if attrs.get("transB", 0) else columns[0]


def _matmul_rows(a: Array, b: Array, attrs: Mapping[str, Any], places: np.ndarray | None) -> Array:
    return at_places(a, places if a.ndim > 2 else None)[..., None]


_GEMM_PRODUCT = Product(_gemm_rows, _gemm_columns, _gemm_weights, when=lambda attrs, rank: not attrs.get("transA", 0))
# Without transB a Gemm's weight lies as a MatMul's.
_MATMUL_PRODUCT = Product(_matmul_rows, _gemm_columns, _gemm_weights, when=lambda attrs, rank: rank == 2)
_GEMM = Linear("b", lambda attrs: 0 if attrs.get("transB") else 1, _GEMM_PRODUCT)
_MATMUL = Linear("b", lambda attrs: -1, _MATMUL_PRODUCT)


@op("Gemm", linear=_GEMM, quant=Quant(absorbs=True, bias="c", summed=_gemm_summed))
def gemm(a: Array, b: Array, c: Array | None = None, *, alpha: float, beta: float, transA: int, transB: int) -> Array:
    y = (a.T if transA else a) @ layout.ordered(b, (1, 0) if transB else (0, 1))
    y = y if alpha == 1 else y * jnp.asarray(alpha, y.dtype)
    if c is None or beta == 0:
        return y
    return y + (c if beta == 1 else c * jnp.asarray(beta, c.dtype))


@integer("Gemm")
def integer_gemm(
    a: Fixed, b: Fixed, c: Fixed | None = None, *, alpha: float, beta: float, transA: int, transB: int,
    ctx: IntegerContext,
) -> Fixed:  # fmt: skip
    if alpha != 1 or (c is not None and beta != 1):
        return NotImplemented
    a = a.replace(array=a.array.T) if transA else a
    weight = layout.ordered(b.array, (1, 0) if transB else (0, 1))
    channel = 0 if transB else 1
    return products(a, b, c, _dot, weight, (weight.shape[0], 1), ctx.target, channel=channel, summed=(0,))


def _dot(a: Array, b: Array, zero: int) -> Array:
    return jnp.matmul(a, b, preferred_element_type=sum_type(a))


@op("FusedGemm", domain="com.microsoft")
def fused_gemm(
    a: Array, b: Array, c: Array | None = None, *, alpha: float = 1.0, beta: float = 1.0, transA: int = 0,
    transB: int = 0, activation: str = "", activation_alpha: float | None = None, activation_beta: float | None = None,
) -> Array:  # fmt: skip
    y = gemm(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)
    return activate(activation, y, [p for p in (activation_alpha, activation_beta) if p is not None])


_PRODUCT = Quant(absorbs=True, summed=lambda attrs, index: -1 if index == 0 else -2)


@op("MatMul", host=True, linear=_MATMUL, quant=_PRODUCT)
def matmul(a: Array, b: Array) -> Array:
    return namespace(a, b).matmul(a, b)


@integer("MatMul")
def integer_matmul(a: Fixed, b: Fixed, *, ctx: IntegerContext) -> Fixed:
    if min(a.array.ndim, b.array.ndim) < 2:
        return NotImplemented
    return products(a, b, None, _dot, b.array, (b.array.shape[-2], 1), ctx.target, channel=-1, summed=(-2,))


@op("FusedMatMul", domain="com.microsoft")
@op("TransposeMatMul", domain="com.microsoft")
def fused_matmul(
    a: Array, b: Array, *, alpha: float = 1.0, transA: int = 0, transB: int = 0, transBatchA: int = 0,
    transBatchB: int = 0,
) -> Array:  # fmt: skip
    """Return alpha * a @ b; `transBatch` moves the first axis of an operand behind its batch axes."""
    a, b = (jnp.moveaxis(x, 0, -2) if batch else x for x, batch in ((a, transBatchA), (b, transBatchB)))
    a, b = (jnp.swapaxes(x, -1, -2) if trans and x.ndim > 1 else x for x, trans in ((a, transA), (b, transB)))
    y = a @ b
    return y if alpha == 1 else y * jnp.asarray(alpha, y.dtype)


@op("Det")
def det(x: Array) -> Array:
    return jnp.linalg.det(wide(x)).astype(x.dtype)
