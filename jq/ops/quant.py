"""QuantizeLinear, DequantizeLinear and DynamicQuantizeLinear, in floats and in integers.

The oracle is onnxruntime: its float32 steps are taken in its order, and what XLA would change about
them (see `numerics.divide` and `numerics.rounded`) is prevented, so that codes are equal and not only close.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from onnx import helper

from jq.arithmetic import layout
from jq.arithmetic.formats import INTEGERS
from jq.arithmetic.numerics import divide, rounded
from jq.errors import ModelError
from jq.graph.domains import MICROSOFT
from jq.ops.integer.fixed import Fixed, Grid, Table, exact, is_power_of_two, wrapped
from jq.ops.integer.rounding import quantize, quantize_real
from jq.ops.table import Array, IntegerContext, integer, op

_WORD = 16  # bits of an activation's integers at most


# --- Float32 arithmetic as written ---


def codes_of(value: Array, zero_point: Array | None, dtype: Any) -> Array:
    """Half-even rounded values plus the zero point, saturated; NaN becomes the lowest code as in onnxruntime."""
    info = jnp.iinfo(dtype)
    zero = jnp.float32(0) if zero_point is None else zero_point.astype(jnp.float32)
    low, high = info.min - zero, info.max - zero
    value = jnp.where(value >= low, jnp.minimum(value, high), low)
    return (jnp.round(value) + zero).astype(dtype)


def scalar(parameter: Array | None) -> Any:
    """A per-tensor scale or zero point, which may come as one element of any rank."""
    return None if parameter is None else parameter.reshape(())


def dequantized(x: Array, scale: Array, zero_point: Array | None) -> Array:
    """Per-tensor `scale * (x - zero_point)` in float32."""
    x = x.astype(jnp.int32)
    zero_point = scalar(zero_point)
    x = x if zero_point is None else x - zero_point.astype(jnp.int32)
    return rounded(x.astype(jnp.float32) * scalar(scale))


def quantized(x: Array, scale: Array, zero_point: Array | None, dtype: Any) -> Array:
    """Per-tensor codes of float32 values."""
    return codes_of(divide(x, scalar(scale)), scalar(zero_point), dtype)


# --- QuantizeLinear, DequantizeLinear ---


def aligned(parameter: Array | None, x: Array, axis: int, block_size: int = 0) -> Any:
    """A scale or zero point that broadcasts against x: per tensor, per axis or per block of an axis."""
    if parameter is None:
        return None
    if block_size:
        blocks = parameter.shape[axis] if parameter.ndim == x.ndim else 0
        if blocks != -(-x.shape[axis] // block_size):
            raise ModelError(
                f"scale or zero point of shape {parameter.shape} fits no blocks of {block_size} in {x.shape}"
            )
        return lax.slice_in_dim(jnp.repeat(parameter, block_size, axis), 0, x.shape[axis], axis=axis)
    if parameter.size == 1:
        return parameter.reshape(())
    if parameter.ndim != 1 or parameter.shape[0] != x.shape[axis]:
        raise ModelError(
            f"scale or zero point of shape {parameter.shape} fits neither one value, nor axis {axis} of {x.shape}, nor "
            "blocks (block_size is 0)"
        )
    return layout.along(parameter, x.ndim, axis)


@op("QuantizeLinear", layout=("axis",))
def quantize_linear(
    x: Array, y_scale: Array, y_zero_point: Array | None = None, *, axis: int = 1, block_size: int = 0,
    output_dtype: int = 0, precision: int = 0, saturate: int = 1,
) -> Array:  # fmt: skip
    """The quotient is taken in float32, as onnxruntime does even for float16, unless `precision` says otherwise."""
    dtype = helper.tensor_dtype_to_np_dtype(output_dtype) if output_dtype else np.uint8
    dtype = np.dtype(dtype if y_zero_point is None else y_zero_point.dtype)
    scale, zero_point = aligned(y_scale, x, axis, block_size), aligned(y_zero_point, x, axis, block_size)
    x, scale = x.astype(jnp.float32), scale.astype(jnp.float32)
    if precision:
        info = jnp.finfo(helper.tensor_dtype_to_np_dtype(precision))
        x, scale = (lax.reduce_precision(v, info.nexp, info.nmant) for v in (x, scale))
    value = divide(x, scale)
    if precision:
        value = lax.reduce_precision(value, info.nexp, info.nmant)
    if jnp.issubdtype(dtype, jnp.integer):
        return codes_of(value, zero_point, dtype)
    if saturate or dtype.itemsize * 8 != jnp.finfo(dtype).bits:  # types below 8 bits have no infinity
        largest = float(jnp.finfo(dtype).max)
        value = jnp.where(value > largest, largest, jnp.where(value < -largest, -largest, value))
    return value.astype(dtype)


@op("DequantizeLinear", layout=("axis",))
def dequantize_linear(
    x: Array, x_scale: Array, x_zero_point: Array | None = None, *, axis: int = 1, block_size: int = 0,
    output_dtype: int = 0,
) -> Array:  # fmt: skip
    dtype = helper.tensor_dtype_to_np_dtype(output_dtype) if output_dtype else x_scale.dtype
    scale, zero_point = aligned(x_scale, x, axis, block_size), aligned(x_zero_point, x, axis, block_size)
    if jnp.issubdtype(x.dtype, jnp.integer):
        x = x.astype(jnp.int32)
        x = x if zero_point is None else x - zero_point.astype(jnp.int32)
        return rounded(x.astype(jnp.float32) * scale.astype(jnp.float32)).astype(dtype)
    return (x.astype(jnp.float32) * scale.astype(jnp.float32)).astype(dtype)


def _grid(scale: Any, zero_point: Any, dtype: Any) -> Grid | None:
    """One scale for a tensor of integers that a signed type of 16 bits holds, if that is what these are."""
    codes = INTEGERS.get(str(dtype))
    if codes is None or codes.bits > _WORD or np.size(scale) != 1 or np.asarray(scale).dtype != np.float32:
        return None
    number = exact(np.reshape(scale, ()))
    return Grid(number, 0 if zero_point is None else int(np.reshape(zero_point, ())), codes) if number > 0 else None


@integer("QuantizeLinear", static=("y_scale", "y_zero_point"), layout="same")
def integer_quantize_linear(
    x: Any, y_scale: Any, y_zero_point: Any = None, *, axis: int = 1, block_size: int = 0, output_dtype: int = 0,
    precision: int = 0, saturate: int = 1, ctx: IntegerContext,
) -> Fixed:  # fmt: skip
    """Where an integer program rounds; for floats, where it begins."""
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(output_dtype) if output_dtype else np.uint8)
    if precision or block_size:
        return NotImplemented
    grid = _grid(y_scale, y_zero_point, dtype if y_zero_point is None else y_zero_point.dtype)
    if grid is None:
        return NotImplemented
    if not isinstance(x, (Fixed, Table)):
        return quantize_real(x, grid, ctx.target) if layout.raw(x).dtype == jnp.float32 else NotImplemented
    rounded_codes = quantize(x, grid, ctx.target)
    return NotImplemented if rounded_codes is None else rounded_codes


@integer("DequantizeLinear", static=("x_scale", "x_zero_point"), layout="same")
def integer_dequantize_linear(
    x: Any, x_scale: Any, x_zero_point: Any = None, *, axis: int = 1, block_size: int = 0, output_dtype: int = 0,
    ctx: IntegerContext,
) -> Fixed:  # fmt: skip
    """The same integers, with what they stand for. Weights may have a scale per channel, and biases 32 bits."""
    if block_size:
        return NotImplemented
    if not isinstance(x, Fixed):  # integers that come in
        dtype = layout.raw(x).dtype
        grid = None if dtype == jnp.int32 else _grid(x_scale, x_zero_point, dtype)
        return NotImplemented if grid is None else wrapped(x, grid).replace(coded=False, floating=_floats(grid.scale))
    if x.grid is None or not x.coded:
        return NotImplemented
    if x.host is None:
        grid = _grid(x_scale, x_zero_point, x.grid.grid)
        if grid is None or grid.grid != x.grid.grid:
            return NotImplemented
        return x.replace(scale=grid.scale, zero=grid.zero, grid=grid, coded=False, floating=_floats(grid.scale))
    zero = np.reshape(0 if x_zero_point is None else x_zero_point, -1).astype(np.int64) - x.grid.middle
    scale = exact(x_scale.reshape(()) if x_scale.size == 1 else x_scale)
    if np.any(zero != zero[0]) or np.ndim(scale) > 1 or not np.all(scale > 0):
        return NotImplemented
    most = int(np.abs(x.host.astype(np.int64) - zero[0]).max(initial=0))
    along = None if isinstance(scale, Fraction) else axis % x.host.ndim
    grid = Grid(Fraction(1) if isinstance(scale, np.ndarray) else scale, int(zero[0]) + x.grid.middle, x.grid.grid)
    return x.replace(
        scale=scale, zero=int(zero[0]), bound=most, axis=along, grid=grid, coded=False, floating=_floats(scale)
    )


def _floats(scale: Any) -> bool:
    return not all(map(is_power_of_two, np.asarray(scale).reshape(-1)))


@op("QuantizeLinear", domain=MICROSOFT, layout=("axis",))
def ms_quantize_linear(x: Array, y_scale: Array, y_zero_point: Array | None = None, *, axis: int = 1) -> Array:
    return quantize_linear(x, y_scale, y_zero_point, axis=axis)


@op("DequantizeLinear", domain=MICROSOFT, layout=("axis",))
def ms_dequantize_linear(x: Array, x_scale: Array, x_zero_point: Array | None = None, *, axis: int = 1) -> Array:
    return dequantize_linear(x, x_scale, x_zero_point, axis=axis)


@op("DynamicQuantizeLinear")
def dynamic_quantize_linear(x: Array) -> tuple[Array, Array, Array]:
    low, high = jnp.minimum(jnp.min(x), 0), jnp.maximum(jnp.max(x), 0)
    scale = jnp.where(high == low, jnp.ones((), x.dtype), divide(high - low, jnp.asarray(255, x.dtype)))
    zero_point = jnp.round(jnp.clip(0 - divide(low, scale), 0, 255)).astype(jnp.uint8)
    return quantized(x, scale, zero_point, jnp.uint8), scale, zero_point
