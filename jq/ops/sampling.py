"""Random tensors, from explicit keys.

The key comes from the `seed` attribute. Without one it comes from the name of the node's first output,
so two nodes differ and every run of a model is the same. Numbers differ from those of other runtimes.
"""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from onnx import helper

from jq.ops.table import Array, Context, op


def _key(seed: float | None, ctx: Context) -> Array:
    if seed is None:
        return jax.random.key(zlib.crc32(ctx.node.outputs[0].encode()))
    return jax.random.key(int(seed) % 2**32 if float(seed).is_integer() else int(np.float32(seed).view(np.uint32)))


def _dtype(dtype: int | None, like: Array | None = None) -> Any:
    wanted = like.dtype if dtype is None and like is not None else helper.tensor_dtype_to_np_dtype(dtype)
    return jax.dtypes.canonicalize_dtype(wanted)


@op("RandomNormal")
def random_normal(
    *, dtype: int, mean: float, scale: float, seed: float | None = None, shape: Any, ctx: Context
) -> Array:
    return mean + scale * jax.random.normal(_key(seed, ctx), tuple(shape), _dtype(dtype))


@op("RandomNormalLike")
def random_normal_like(
    x: Array, *, dtype: int | None = None, mean: float, scale: float, seed: float | None = None, ctx: Context
) -> Array:
    return mean + scale * jax.random.normal(_key(seed, ctx), x.shape, _dtype(dtype, x))


@op("RandomUniform")
def random_uniform(
    *, dtype: int, high: float, low: float, seed: float | None = None, shape: Any, ctx: Context
) -> Array:
    return jax.random.uniform(_key(seed, ctx), tuple(shape), _dtype(dtype), low, high)


@op("RandomUniformLike")
def random_uniform_like(
    x: Array, *, dtype: int | None = None, high: float, low: float, seed: float | None = None, ctx: Context
) -> Array:
    return jax.random.uniform(_key(seed, ctx), x.shape, _dtype(dtype, x), low, high)


@op("Bernoulli")
def bernoulli(x: Array, *, dtype: int | None = None, seed: float | None = None, ctx: Context) -> Array:
    return jax.random.bernoulli(_key(seed, ctx), x).astype(_dtype(dtype, x))


@op("Multinomial")
def multinomial(x: Array, *, dtype: int, sample_size: int, seed: float | None = None, ctx: Context) -> Array:
    """Draws class indices, from rows of unnormalized log-probabilities."""
    draws = jax.random.categorical(_key(seed, ctx), x, axis=-1, shape=(sample_size, x.shape[0]))
    return draws.T.astype(_dtype(dtype))


@op("Dropout", since=12, static=("training_mode",), layout="same")
def dropout(
    data: Array, ratio: Array | None = None, training_mode: Array | None = None, *, seed: int | None = None,
    ctx: Context,
) -> Any:  # fmt: skip
    if training_mode is None or not training_mode:
        return (data, jnp.ones(data.shape, bool)) if ctx.wants(1) else data
    ratio = 0.5 if ratio is None else ratio.astype(jnp.float32)
    mask = jax.random.uniform(_key(seed, ctx), data.shape) >= ratio
    return jnp.where(mask, data * (1 / (1 - ratio)), 0).astype(data.dtype), mask


@op("Dropout", layout="same")
def dropout_of_inference(data: Array, *, ctx: Context) -> Any:
    """Before opset 12 dropout is for inference; the mask is of the data's type before opset 10."""
    return (data, jnp.ones(data.shape, bool if ctx.opset >= 10 else data.dtype)) if ctx.wants(1) else data
