"""Normalization and softmax."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from onnx import helper

from jq.arithmetic import layout
from jq.arithmetic.formats import INT16
from jq.errors import ModelError
from jq.ops.integer.fixed import Fixed, Grid, Table
from jq.ops.table import Array, Context, IntegerContext, Quant, integer, op


def _stash(x: Array, stash_type: int = 1) -> Any:
    """The type to compute statistics in: at least the one that the node asks for."""
    return jnp.promote_types(x.dtype, helper.tensor_dtype_to_np_dtype(stash_type))


def _trailing(x: Array, axis: int) -> tuple[int, ...]:
    """The axes from `axis` on."""
    return tuple(range(axis % x.ndim, x.ndim))


def _standardized(x: Array, axes: int | Sequence[int], epsilon: float) -> tuple[Array, Array, Array]:
    """(x - mean) / sqrt(variance + epsilon), with the mean and the factor."""
    mean = jnp.mean(x, axis=axes, keepdims=True)
    centered = x - mean
    inverse = lax.rsqrt(jnp.mean(centered * centered, axis=axes, keepdims=True) + epsilon)
    return centered * inverse, mean, inverse


# --- Over the batch ---


def _batch_normalized(x: Array, scale: Array, b: Array, mean: Array, var: Array, epsilon: float) -> Array:
    """One multiply-add per element of channels-last `x`; the rest is per channel."""
    # Before opset 9 with spatial=0 the statistics are those of every position, (C, *spatial).
    scale, b, mean, var = (layout.channels_last(v, 0) for v in (scale, b, mean, var))
    factor = scale * lax.rsqrt(var + epsilon)
    return (x * factor + (b - mean * factor)).astype(x.dtype)


def _batch_statistics(x: Array, scale: Array) -> tuple[Array, Array]:
    wide = x.astype(_stash(x))
    axes = 0 if scale.ndim > 1 else tuple(range(x.ndim - 1))
    mean, var = jnp.mean(wide, axis=axes), jnp.var(wide, axis=axes)
    return layout.channels_first(mean, 0), layout.channels_first(var, 0)


@op("BatchNormalization", since=14, layout="last")
def batch_normalization(
    x: Array, scale: Array, b: Array, input_mean: Array, input_var: Array, *, epsilon: float, momentum: float,
    training_mode: int,
) -> Any:  # fmt: skip
    if not training_mode:
        return _batch_normalized(x, scale, b, input_mean, input_var, epsilon)
    mean, var = _batch_statistics(x, scale)
    running = [(r * momentum + s * (1 - momentum)).astype(r.dtype) for r, s in ((input_mean, mean), (input_var, var))]
    return _batch_normalized(x, scale, b, mean, var, epsilon), *running


@op("BatchNormalization", layout="last")
def batch_normalization_by_outputs(
    x: Array, scale: Array, b: Array, mean: Array, var: Array, *, epsilon: float, momentum: float, is_test: int = 0,
    ctx: Context,
) -> Any:  # fmt: skip
    """Before opset 14 a node trains if it names more outputs than the first."""
    training = ctx.wants(1) and not is_test
    results = batch_normalization(x, scale, b, mean, var, epsilon=epsilon, momentum=momentum, training_mode=training)
    return (*results, *_batch_statistics(x, scale)) if training else results


# --- Over axes of one sample ---


@op("InstanceNormalization", layout="last", quant=Quant(bias="b"))
def instance_normalization(x: Array, scale: Array, b: Array, *, epsilon: float) -> Array:
    y, *_ = _standardized(x.astype(_stash(x)), tuple(range(1, x.ndim - 1)), epsilon)
    return (y * scale + b).astype(x.dtype)


@op("GroupNormalization", since=21, layout="last")
def group_normalization(
    x: Array, scale: Array, bias: Array, *, epsilon: float, num_groups: int, stash_type: int = 1
) -> Array:
    if num_groups < 1 or x.shape[-1] % num_groups:
        raise ModelError(f"num_groups is {num_groups}, which does not divide the {x.shape[-1]} channels")
    grouped = x.astype(_stash(x, stash_type)).reshape(x.shape[0], -1, num_groups, x.shape[-1] // num_groups)
    y, *_ = _standardized(grouped, (1, 3), epsilon)
    return y.reshape(x.shape).astype(x.dtype) * scale + bias


@op("GroupNormalization", layout="last")
def group_normalization_by_group(x: Array, scale: Array, bias: Array, *, epsilon: float, num_groups: int) -> Array:
    """Before opset 21 scale and bias are given per group."""
    scale, bias = (jnp.repeat(v, x.shape[-1] // num_groups) for v in (scale, bias))
    return group_normalization(x, scale, bias, epsilon=epsilon, num_groups=num_groups)


@op("LayerNormalization", quant=Quant(outputs=1))
def layer_normalization(
    x: Array, scale: Array, b: Array | None = None, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> tuple[Array, Array, Array]:
    y, mean, inverse = _standardized(x.astype(_stash(x, stash_type)), _trailing(x, axis), epsilon)
    y = y.astype(x.dtype) * scale
    stash = helper.tensor_dtype_to_np_dtype(stash_type)
    return y if b is None else y + b, mean.astype(stash), inverse.astype(stash)


@op("RMSNormalization")
@op("SimplifiedLayerNormalization")
@op("SimplifiedLayerNormalization", domain="com.microsoft")
def rms_normalization(
    x: Array, scale: Array, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> tuple[Array, Array]:
    """RMSNormalization, by onnxruntime's name too, under which it has the factor as a second output."""
    wide = x.astype(_stash(x, stash_type))
    inverse = lax.rsqrt(jnp.mean(wide * wide, axis=_trailing(x, axis), keepdims=True) + epsilon)
    return (wide * inverse).astype(x.dtype) * scale, inverse


@op("SkipLayerNormalization", domain="com.microsoft")
def skip_layer_normalization(
    x: Array, skip: Array, gamma: Array, beta: Array | None = None, bias: Array | None = None, *, epsilon: float = 1e-12
) -> tuple[Array, Array, Array, Array]:
    total = x + skip if bias is None else x + skip + bias
    return *layer_normalization(total, gamma, beta, epsilon=epsilon), total


@op("SkipSimplifiedLayerNormalization", domain="com.microsoft")
def skip_simplified_layer_normalization(
    x: Array, skip: Array, gamma: Array, bias: Array | None = None, *, epsilon: float = 1e-12
) -> tuple[Array, Array, Array, Array]:
    """Its second output, the mean, is always absent."""
    total = x + skip if bias is None else x + skip + bias
    y, inverse = rms_normalization(total, gamma, epsilon=epsilon)
    return y, jnp.zeros_like(inverse), inverse, total


@op("EmbedLayerNormalization", domain="com.microsoft")
def embed_layer_normalization(
    input_ids: Array, segment_ids: Array | None, word_embedding: Array, position_embedding: Array,
    segment_embedding: Array | None, gamma: Array, beta: Array, mask: Array | None = None,
    position_ids: Array | None = None, *, epsilon: float = 1e-12,
) -> tuple[Array, Array, Array]:  # fmt: skip
    positions = jnp.arange(input_ids.shape[1]) if position_ids is None else position_ids
    total = word_embedding[input_ids] + position_embedding[positions]
    if segment_ids is not None and segment_embedding is not None:
        total = total + segment_embedding[segment_ids]
    count = jnp.zeros(len(input_ids), jnp.int32) if mask is None else jnp.sum(mask, axis=1, dtype=jnp.int32)
    return layer_normalization(total, gamma, beta, epsilon=epsilon)[0], count, total


@op("MeanVarianceNormalization", layout=("axes",))
def mean_variance_normalization(x: Array, *, axes: Any = (0, 2, 3)) -> Array:
    axes = tuple(int(a) for a in axes)
    centered = x - jnp.mean(x, axis=axes, keepdims=True)
    return centered / (jnp.sqrt(jnp.mean(centered * centered, axis=axes, keepdims=True)) + 1e-9)


@op("LpNormalization", layout=("axis",))
def lp_normalization(x: Array, *, axis: int = -1, p: int = 2) -> Array:
    total = jnp.sum(jnp.abs(x) if p == 1 else x * x, axis=axis, keepdims=True)
    positive = jnp.where(total == 0, 1, total)  # a zero vector stays zero, and its gradient finite
    return x / (positive if p == 1 else jnp.sqrt(positive))


@op("LRN", layout="last")
def lrn(x: Array, *, alpha: float, beta: float, bias: float, size: int) -> Array:
    """x / (bias + alpha / size * sum of squares over `size` neighbouring channels) ** beta"""
    window, pads = (1,) * (x.ndim - 1) + (size,), [(0, 0)] * (x.ndim - 1) + [((size - 1) // 2, size // 2)]
    total = lax.reduce_window(x * x, np.zeros((), x.dtype), lax.add, window, (1,) * x.ndim, pads)
    return x * jnp.power(bias + (alpha / size) * total, -beta)


# --- Softmax ---


def _softmax(x: Array, axes: int | tuple[int, ...]) -> Array:
    # XLA computes what makes x again beside the subtraction, in one fused multiply-add: unrounded, x is
    # not its own maximum any more and at 1e10 every term underflows. A clamp in between stops that.
    blind = jnp.max(x, axis=axes, keepdims=True, initial=-jnp.inf) == -jnp.inf  # NaN, which exporters ask for
    x = jnp.clip(x, -jnp.finfo(x.dtype).max)
    return jnp.where(blind, jnp.nan, jax.nn.softmax(x, axes))


def _own_axis(attrs: Mapping[str, Any], index: int) -> int:
    return int(attrs.get("axis", -1))


@op("Softmax", since=13, layout=("axis",), bounds=(0.0, 1.0), quant=Quant(summed=_own_axis))
def softmax(x: Array, *, axis: int) -> Array:
    return _softmax(x, axis)


@op("Softmax", bounds=(0.0, 1.0), quant=Quant(summed=_own_axis))
def softmax_of_matrix(x: Array, *, axis: int) -> Array:
    """Before opset 13 the operators of this section see a matrix: the axes from `axis` on are one."""
    return _softmax(x, _trailing(x, axis))


_LANES = 16  # that the chip adds up apart


@integer("Softmax")
def integer_softmax(x: Fixed, *, axis: int, ctx: IntegerContext) -> Table:
    """The chip's: exponentials without a maximum, their sum's reciprocal and the products in bfloat16."""
    if not ctx.target.bfloat16_softmax or not x.is_codes or x.bound > 255:
        return NotImplemented
    if ctx.opset < 13 and axis % x.array.ndim != x.array.ndim - 1:
        return NotImplemented  # there it is over all axes from this one on
    low, high = x.span()
    with np.errstate(over="ignore"):
        exponentials = np.exp(np.arange(low, high + 1).astype(np.float32) * np.float32(x.scale))
    table = Table(x, exponentials.astype(ml_dtypes.bfloat16).astype(np.float32))
    bits = _softmax_bits(jnp.moveaxis(table.look_up(table.values), axis, -1))
    bits = jnp.moveaxis(bits, -1, axis)
    every = np.arange(INT16.qmin, INT16.qmax + 1).astype(np.int16).view(ml_dtypes.bfloat16).astype(np.float32)
    source = Fixed(bits, Fraction(1), 1 << 15, grid=Grid(Fraction(1), 0, INT16), causes=frozenset({"softmax"}))
    return Table(source, every, in_bfloat16=True)


@jax.jit
def _softmax_bits(powers: Array) -> Array:
    """The bits of bfloat16(e * (1 / sum of e)): 16 interleaved sums, then a tree, and a table of reciprocals."""
    count = powers.shape[-1]
    lanes = jnp.pad(powers, [(0, 0)] * (powers.ndim - 1) + [(0, -count % _LANES)])
    lanes = jnp.moveaxis(lanes.reshape(*lanes.shape[:-1], -1, _LANES), -2, 0)
    total, _ = lax.scan(lambda s, row: (s + row, None), jnp.zeros_like(lanes[0]), lanes)
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    upper = (lax.bitcast_convert_type(total, jnp.int32) + (1 << 15)) >> 16
    exponent, mantissa = upper >> 7, upper & 127
    reciprocals = np.array([(256 * (128 - m) + (128 + m)) // (2 * (128 + m)) for m in range(128)], np.int32)
    inverse = ((253 - exponent) << 7) + jnp.asarray(reciprocals)[mantissa]
    product = powers * lax.bitcast_convert_type(inverse << 16, jnp.float32)
    bits = lax.bitcast_convert_type(product, jnp.int32)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # half to even


@op("LogSoftmax", since=13, layout=("axis",))
def log_softmax(x: Array, *, axis: int) -> Array:
    return jax.nn.log_softmax(x, axis=axis)


@op("LogSoftmax")
def log_softmax_of_matrix(x: Array, *, axis: int) -> Array:
    return jax.nn.log_softmax(x, axis=_trailing(x, axis))


@op("Hardmax", since=13, layout=("axis",))
def hardmax(x: Array, *, axis: int) -> Array:
    return jax.nn.one_hot(jnp.argmax(x, axis=axis), x.shape[axis], axis=axis, dtype=x.dtype)


@op("Hardmax")
def hardmax_of_matrix(x: Array, *, axis: int) -> Array:
    matrix = x.reshape(math.prod(x.shape[: axis % x.ndim]), -1)
    return hardmax(matrix, axis=-1).reshape(x.shape)
