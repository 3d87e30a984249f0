"""Quantize, dequantize and the integer operators of quantized models.

The oracle is onnxruntime: its float32 steps are taken in its order, and what XLA would change about
them (see `numerics.divide` and `numerics.rounded`) is prevented, so that codes are equal and not only close.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from onnx import helper

from jq.arithmetic import kernels, layout
from jq.arithmetic.formats import INTEGERS
from jq.arithmetic.numerics import divide, rounded
from jq.errors import ModelError, UnsupportedOp
from jq.ops.convolutions import windows
from jq.ops.integer.fixed import Fixed, Grid, Table, exact, is_power_of_two, wrapped
from jq.ops.integer.rounding import quantize, quantize_real
from jq.ops.table import Array, Context, IntegerContext, integer, op

_MS = "com.microsoft"
_WORD = 16  # bits of an activation's integers at most
_ROWS = (-2, -1)  # of a matrix


# ---------------------------------------------------------------------------------------------
# Float32 arithmetic as written
# ---------------------------------------------------------------------------------------------


def _fused(code: Array, ratio: Array, addend: Array) -> Array:
    """`code * ratio + addend` with one rounding, for codes of at most 9 bits, on every backend."""
    high = lax.bitcast_convert_type(lax.bitcast_convert_type(ratio, jnp.int32) & -4096, jnp.float32)
    a, b = code * high, code * (ratio - high)  # both exact
    total = a + addend
    part = total - a
    return total + (((a - (total - part)) + (addend - part)) + b)


def _codes(value: Array, zero_point: Array | None, dtype: Any) -> Array:
    """Half-even rounded values plus the zero point, saturated; NaN becomes the lowest code as in onnxruntime."""
    info = jnp.iinfo(dtype)
    zero = jnp.float32(0) if zero_point is None else zero_point.astype(jnp.float32)
    low, high = info.min - zero, info.max - zero
    value = jnp.where(value >= low, jnp.minimum(value, high), low)
    return (jnp.round(value) + zero).astype(dtype)


def _scalar(parameter: Array | None) -> Any:
    """A per-tensor scale or zero point, which may come as one element of any rank."""
    return None if parameter is None else parameter.reshape(())


def _dequantized(x: Array, scale: Array, zero_point: Array | None) -> Array:
    """Per-tensor `scale * (x - zero_point)` in float32."""
    x = x.astype(jnp.int32)
    zero_point = _scalar(zero_point)
    x = x if zero_point is None else x - zero_point.astype(jnp.int32)
    return rounded(x.astype(jnp.float32) * _scalar(scale))


def _quantized(x: Array, scale: Array, zero_point: Array | None, dtype: Any) -> Array:
    """Per-tensor codes of float32 values."""
    return _codes(divide(x, _scalar(scale)), _scalar(zero_point), dtype)


# ---------------------------------------------------------------------------------------------
# QuantizeLinear, DequantizeLinear
# ---------------------------------------------------------------------------------------------


def _along(parameter: Array | None, x: Array, axis: int, block_size: int) -> Any:
    """A scale or zero point that broadcasts against x: per tensor, per axis or per block of an axis."""
    if parameter is None:
        return None
    if block_size:
        return lax.slice_in_dim(jnp.repeat(parameter, block_size, axis), 0, x.shape[axis], axis=axis)
    if parameter.size == 1:
        return parameter.reshape(())
    if parameter.ndim != 1 or parameter.shape[0] != x.shape[axis]:
        raise ModelError(
            f"scale or zero point of shape {parameter.shape} fits neither one value, nor axis {axis} of {x.shape}, nor "
            "blocks (block_size is 0)"
        )
    return parameter.reshape([-1 if i == axis % x.ndim else 1 for i in range(x.ndim)])


@op("QuantizeLinear", layout=("axis",))
def quantize_linear(
    x: Array, y_scale: Array, y_zero_point: Array | None = None, *, axis: int = 1, block_size: int = 0,
    output_dtype: int = 0, precision: int = 0, saturate: int = 1,
) -> Array:  # fmt: skip
    """The quotient is taken in float32, as onnxruntime does even for float16, unless `precision` says otherwise."""
    dtype = helper.tensor_dtype_to_np_dtype(output_dtype) if output_dtype else np.uint8
    dtype = np.dtype(dtype if y_zero_point is None else y_zero_point.dtype)
    scale, zero_point = _along(y_scale, x, axis, block_size), _along(y_zero_point, x, axis, block_size)
    x, scale = x.astype(jnp.float32), scale.astype(jnp.float32)
    if precision:
        info = jnp.finfo(helper.tensor_dtype_to_np_dtype(precision))
        x, scale = (lax.reduce_precision(v, info.nexp, info.nmant) for v in (x, scale))
    value = divide(x, scale)
    if precision:
        value = lax.reduce_precision(value, info.nexp, info.nmant)
    if jnp.issubdtype(dtype, jnp.integer):
        return _codes(value, zero_point, dtype)
    if saturate or dtype.itemsize * 8 != jnp.finfo(dtype).bits:  # types below 8 bits have no infinity
        largest = float(jnp.finfo(dtype).max)
        value = jnp.where(value > largest, largest, jnp.where(value < -largest, -largest, value))
    return value.astype(dtype)


@op("DequantizeLinear", layout=("axis",))
def dequantize_linear(
    x: Array,
    x_scale: Array,
    x_zero_point: Array | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Array:
    dtype = helper.tensor_dtype_to_np_dtype(output_dtype) if output_dtype else x_scale.dtype
    scale, zero_point = _along(x_scale, x, axis, block_size), _along(x_zero_point, x, axis, block_size)
    if jnp.issubdtype(x.dtype, jnp.integer):
        x = x.astype(jnp.int32)
        x = x if zero_point is None else x - zero_point.astype(jnp.int32)
        return rounded(x.astype(jnp.float32) * scale.astype(jnp.float32)).astype(dtype)
    return (x.astype(jnp.float32) * scale.astype(jnp.float32)).astype(dtype)


def _grid(scale: Any, zero_point: Any, dtype: Any) -> Grid | None:
    """One scale for a tensor of integers that a signed type of 16 bits holds, if that is what these are."""
    found = INTEGERS.get(str(dtype))
    if found is None or found.bits > _WORD or np.size(scale) != 1 or np.asarray(scale).dtype != np.float32:
        return None
    number = exact(np.reshape(scale, ()))
    return Grid(number, 0 if zero_point is None else int(np.reshape(zero_point, ())), found) if number > 0 else None


@integer("QuantizeLinear", static=("y_scale", "y_zero_point"), layout="same")
def integer_quantize_linear(
    x: Any, y_scale: Any, y_zero_point: Any = None, *, axis: int = 1, block_size: int = 0, output_dtype: int = 0,
    precision: int = 0, saturate: int = 1, ctx: IntegerContext,
) -> Fixed:  # fmt: skip
    """Where an integer program rounds; of floats, where it begins."""
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(output_dtype) if output_dtype else np.uint8)
    if precision or block_size:
        return NotImplemented
    grid = _grid(y_scale, y_zero_point, dtype if y_zero_point is None else y_zero_point.dtype)
    if grid is None:
        return NotImplemented
    if not isinstance(x, (Fixed, Table)):
        return quantize_real(x, grid, ctx.target) if layout.raw(x).dtype == jnp.float32 else NotImplemented
    found = quantize(x, grid, ctx.target)
    return NotImplemented if found is None else found


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
        grid = _grid(x_scale, x_zero_point, x.grid.codes)
        if grid is None or grid.codes != x.grid.codes:
            return NotImplemented
        return x.replace(scale=grid.scale, zero=grid.zero, grid=grid, coded=False, floating=_floats(grid.scale))
    zero = np.reshape(0 if x_zero_point is None else x_zero_point, -1).astype(np.int64) - x.grid.middle
    scale = exact(x_scale.reshape(()) if x_scale.size == 1 else x_scale)
    if np.any(zero != zero[0]) or np.ndim(scale) > 1 or not np.all(scale > 0):
        return NotImplemented
    most = int(np.abs(x.host.astype(np.int64) - zero[0]).max(initial=0))
    along = None if isinstance(scale, Fraction) else axis % x.host.ndim
    grid = Grid(Fraction(1) if isinstance(scale, np.ndarray) else scale, int(zero[0]) + x.grid.middle, x.grid.codes)
    return x.replace(
        scale=scale, zero=int(zero[0]), bound=most, axis=along, grid=grid, coded=False, floating=_floats(scale)
    )


def _floats(scale: Any) -> bool:
    return not all(map(is_power_of_two, np.asarray(scale).reshape(-1)))


@op("QuantizeLinear", domain=_MS, layout=("axis",))
def ms_quantize_linear(x: Array, y_scale: Array, y_zero_point: Array | None = None, *, axis: int = 1) -> Array:
    return quantize_linear(x, y_scale, y_zero_point, axis=axis)


@op("DequantizeLinear", domain=_MS, layout=("axis",))
def ms_dequantize_linear(x: Array, x_scale: Array, x_zero_point: Array | None = None, *, axis: int = 1) -> Array:
    return dequantize_linear(x, x_scale, x_zero_point, axis=axis)


@op("DynamicQuantizeLinear")
def dynamic_quantize_linear(x: Array) -> tuple[Array, Array, Array]:
    low, high = jnp.minimum(jnp.min(x), 0), jnp.maximum(jnp.max(x), 0)
    scale = jnp.where(high == low, jnp.ones((), x.dtype), divide(high - low, jnp.asarray(255, x.dtype)))
    zero_point = jnp.round(jnp.clip(0 - divide(low, scale), 0, 255)).astype(jnp.uint8)
    return _quantized(x, scale, zero_point, jnp.uint8), scale, zero_point


# ---------------------------------------------------------------------------------------------
# Integer convolution and matrix product
# ---------------------------------------------------------------------------------------------


def _signed(x: Array, zero_point: Array | None) -> tuple[Array, Array]:
    """8-bit codes as int8, with the int32 zero point that goes with them; a known one stays known."""
    if zero_point is None or isinstance(zero_point, np.ndarray):
        zero = np.asarray(0 if zero_point is None else zero_point, np.int32)
    else:
        zero = zero_point.astype(jnp.int32)
    if x.dtype == jnp.int8:
        return x, zero
    if x.dtype != jnp.uint8:
        raise UnsupportedOp(f"its operand is {x.dtype}; integer products take int8 and uint8, dequantize it before")
    return lax.bitcast_convert_type(x ^ jnp.uint8(128), jnp.int8), zero - 128


def _integer_conv(
    x: Array, x_zero: Array | None, w: Any, w_zero: Array | None, auto_pad: str, dilations: Any, group: int, pads: Any,
    strides: Any, ctx: Context,
) -> Array:  # fmt: skip
    """The exact int32 convolution of (x - x_zero) with (w - w_zero), channels last.

    It runs on int8 operands, the only integers that XLA's convolution library takes, and corrects for
    the zero points by sums: that of the weights is cheap, that of x is skipped where the weights' is zero.
    """
    strides, dilations, pads = windows(x.shape[1:-1], w.shape[2:], strides, dilations, pads, auto_pad)
    w = layout.ordered(w, layout.weight_order(len(w.shape)))
    (x, x_zero), (w, w_zero) = _signed(x, _scalar(x_zero)), _signed(w, w_zero)
    # Padding is real zero, which is the code `x_zero`.
    x = lax.pad(x, x_zero.astype(jnp.int8), [(0, 0, 0), *((lo, hi, 0) for lo, hi in pads), (0, 0, 0)])
    unpadded = ((0, 0),) * len(pads)
    options: dict[str, Any] = {"strides": strides, "dilations": dilations, "pads": unpadded}
    y = kernels.conv(x, w, group=group, lowering=ctx.lowering, dtype=jnp.int32, **options)
    y = y - x_zero * jnp.sum(w, axis=tuple(range(w.ndim - 1)), dtype=jnp.int32)
    if isinstance(w_zero, np.ndarray) and not w_zero.any():
        return y
    grouped = x.reshape(*x.shape[:-1], group, x.shape[-1] // group)
    sums = jnp.sum(grouped, axis=-1, dtype=jnp.int32) - x_zero * w.shape[-2]
    sums = kernels.sum_pool(sums, w.shape[:-2], **options)
    return y - w_zero * jnp.repeat(sums, w.shape[-1] // group, axis=-1)


def _integer_matmul(a: Array, a_zero: Array | None, b: Array, b_zero: Array | None) -> Array:
    """The exact int32 product of (a - a_zero) with (b - b_zero); zero points may be per row of a, per column of b."""
    (a, a_zero), (b, b_zero) = _signed(a, a_zero), _signed(b, b_zero)
    a_zero = a_zero[:, None] if a_zero.ndim == 1 else a_zero
    vectors = [i for i, m in zip(_ROWS, (a, b), strict=True) if m.ndim == 1]
    a, b = (a[None] if a.ndim == 1 else a), (b[:, None] if b.ndim == 1 else b)
    rows = jnp.sum(a, axis=-1, keepdims=True, dtype=jnp.int32)
    columns = jnp.sum(b, axis=-2, keepdims=True, dtype=jnp.int32)
    y = jnp.matmul(a, b, preferred_element_type=jnp.int32)
    y = y - a_zero * columns - b_zero * rows + a_zero * b_zero * a.shape[-1]
    return jnp.squeeze(y, tuple(vectors)) if vectors else y


def _requantized(total: Array, scale: Array, zero_point: Array | None, dtype: Any) -> Array:
    return _codes(total.astype(jnp.float32) * scale.astype(jnp.float32), _scalar(zero_point), dtype)


@op("ConvInteger", weight="w", layout="last", static=("w_zero_point",))
def conv_integer(
    x: Array, w: Array, x_zero_point: Array | None = None, w_zero_point: Array | None = None, *, auto_pad: str,
    dilations: Any, group: int, kernel_shape: Any, pads: Any, strides: Any, ctx: Context,
) -> Array:  # fmt: skip
    return _integer_conv(x, x_zero_point, w, w_zero_point, auto_pad, dilations, group, pads, strides, ctx)


@op("QLinearConv", weight="w", layout="last", static=("w_zero_point",))
def qlinear_conv(
    x: Array, x_scale: Array, x_zero_point: Array | None, w: Array, w_scale: Array, w_zero_point: Array | None,
    y_scale: Array, y_zero_point: Array | None, B: Array | None = None, *, auto_pad: str = "NOTSET", dilations: Any,
    group: int = 1, kernel_shape: Any, pads: Any, strides: Any, ctx: Context,
) -> Array:  # fmt: skip
    total = _integer_conv(x, x_zero_point, w, w_zero_point, auto_pad, dilations, group, pads, strides, ctx)
    total = total if B is None else total + B
    scale = divide(_scalar(x_scale) * w_scale, _scalar(y_scale))
    return _requantized(total, scale, y_zero_point, x.dtype if y_zero_point is None else y_zero_point.dtype)


@op("QLinearConv", domain=_MS, weight="w", layout="last", static=("w_zero_point",))
def ms_qlinear_conv(
    x: Array, x_scale: Array, x_zero_point: Array | None, w: Array, w_scale: Array, w_zero_point: Array | None,
    y_scale: Array, y_zero_point: Array | None, B: Array | None = None, *, channels_last: int = 0,
    auto_pad: str = "NOTSET", dilations: Any, group: int = 1, kernel_shape: Any, pads: Any, strides: Any,
    ctx: Context,
) -> Array:  # fmt: skip
    y = qlinear_conv(
        layout.channels_first(x) if channels_last else x, x_scale, x_zero_point, w, w_scale, w_zero_point, y_scale,
        y_zero_point, B, auto_pad=auto_pad, dilations=dilations, group=group, kernel_shape=kernel_shape, pads=pads,
        strides=strides, ctx=ctx,
    )  # fmt: skip
    return layout.channels_last(y) if channels_last else y


@op("MatMulInteger")
def matmul_integer(A: Array, B: Array, a_zero_point: Array | None = None, b_zero_point: Array | None = None) -> Array:
    return _integer_matmul(A, a_zero_point, B, b_zero_point)


@op("QLinearMatMul")
def qlinear_matmul(
    a: Array, a_scale: Array, a_zero_point: Array, b: Array, b_scale: Array, b_zero_point: Array, y_scale: Array,
    y_zero_point: Array,
) -> Array:  # fmt: skip
    total = _integer_matmul(a, a_zero_point, b, b_zero_point)
    a_scale, b_scale, y_scale = (s.astype(jnp.float32) for s in (a_scale, b_scale, y_scale))
    a_scale = a_scale[:, None] if a_scale.ndim == 1 and a_scale.size > 1 else a_scale
    return _requantized(total, divide(a_scale * b_scale, _scalar(y_scale)), y_zero_point, y_zero_point.dtype)


@op("MatMulIntegerToFloat", domain=_MS)
def matmul_integer_to_float(
    A: Array, B: Array, a_scale: Array, b_scale: Array, a_zero_point: Array | None = None,
    b_zero_point: Array | None = None, bias: Array | None = None,
) -> Array:  # fmt: skip
    total = _integer_matmul(A, a_zero_point, B, b_zero_point)
    y = total.astype(jnp.float32) * (a_scale * b_scale)
    return y if bias is None else rounded(y) + bias


@op("DynamicQuantizeMatMul", domain=_MS)
def dynamic_quantize_matmul(
    A: Array, B: Array, b_scale: Array, b_zero_point: Array | None = None, bias: Array | None = None
) -> Array:
    codes, scale, zero_point = dynamic_quantize_linear(A)
    return matmul_integer_to_float(codes, B, scale, b_scale, zero_point, b_zero_point, bias)


@op("QGemm", domain=_MS)
def qgemm(
    A: Array, a_scale: Array, a_zero_point: Array, B: Array, b_scale: Array, b_zero_point: Array,
    C: Array | None = None, y_scale: Array | None = None, y_zero_point: Array | None = None, *, alpha: float = 1.0,
    transA: int = 0, transB: int = 0,
) -> Array:  # fmt: skip
    a, b = (A.T if transA else A), (B.T if transB else B)
    total = _integer_matmul(a, a_zero_point, b, b_zero_point)
    total = total if C is None else total + C
    scale = jnp.float32(alpha) * _scalar(a_scale) * b_scale
    if y_scale is None:
        return total.astype(jnp.float32) * scale
    dtype = A.dtype if y_zero_point is None else y_zero_point.dtype
    return _requantized(total, divide(scale, _scalar(y_scale)), y_zero_point, dtype)


# ---------------------------------------------------------------------------------------------
# Elementwise, pooling and the rest of com.microsoft
# ---------------------------------------------------------------------------------------------


@op("QLinearAdd", domain=_MS, layout="same")
def qlinear_add(
    A: Array, A_scale: Array, A_zero_point: Array | None, B: Array, B_scale: Array, B_zero_point: Array | None,
    C_scale: Array, C_zero_point: Array | None = None,
) -> Array:  # fmt: skip
    """Two fused multiply-adds on the codes, the constant part first: onnxruntime's formula on x86."""
    a_ratio, b_ratio = _scalar(A_scale) / _scalar(C_scale), _scalar(B_scale) / _scalar(C_scale)
    a_zero, b_zero, c_zero = (
        jnp.float32(0) if z is None else _scalar(z).astype(jnp.float32)
        for z in (A_zero_point, B_zero_point, C_zero_point)
    )
    fixed = c_zero - _fused(a_zero, a_ratio, rounded(b_ratio * b_zero))
    a, b = A.astype(jnp.float32), B.astype(jnp.float32)
    return _codes(_fused(a, a_ratio, _fused(b, b_ratio, fixed)), None, A.dtype)


@op("QLinearMul", domain=_MS, layout="same")
def qlinear_mul(
    A: Array, A_scale: Array, A_zero_point: Array | None, B: Array, B_scale: Array, B_zero_point: Array | None,
    C_scale: Array, C_zero_point: Array | None = None,
) -> Array:  # fmt: skip
    a = A.astype(jnp.int32) - (0 if A_zero_point is None else _scalar(A_zero_point).astype(jnp.int32))
    b = B.astype(jnp.int32) - (0 if B_zero_point is None else _scalar(B_zero_point).astype(jnp.int32))
    ratio = _scalar(A_scale) * _scalar(B_scale) / _scalar(C_scale)
    zero = jnp.float32(0) if C_zero_point is None else _scalar(C_zero_point).astype(jnp.float32)
    return _codes(rounded((a * b).astype(jnp.float32) * ratio) + zero, None, A.dtype)


@op("QLinearLeakyRelu", domain=_MS, layout="same")
def qlinear_leaky_relu(
    X: Array, X_scale: Array, X_zero_point: Array | None, Y_scale: Array, Y_zero_point: Array | None = None, *,
    alpha: float = 0.01,
) -> Array:  # fmt: skip
    x = _dequantized(X, X_scale, X_zero_point)
    return _quantized(jnp.where(x >= 0, x, x * jnp.float32(alpha)), Y_scale, Y_zero_point, X.dtype)


@op("QLinearSigmoid", domain=_MS, layout="same")
def qlinear_sigmoid(
    X: Array, X_scale: Array, X_zero_point: Array | None, Y_scale: Array, Y_zero_point: Array | None = None
) -> Array:
    return _quantized(jax.nn.sigmoid(_dequantized(X, X_scale, X_zero_point)), Y_scale, Y_zero_point, X.dtype)


@op("QLinearSoftmax", domain=_MS, static=("X_scale", "y_scale"))
def qlinear_softmax(
    X: Array, X_scale: Array, x_zero_point: Array | None, y_scale: Array, y_zero_point: Array | None, *,
    axis: int | None = None, opset: int,
) -> Array:  # fmt: skip
    """A table of exponentials of the distance to the maximum, which is why the scales must be known while tracing."""
    axis = (1 if opset < 13 else -1) if axis is None else axis
    x = X.reshape(*X.shape[:axis], -1) if opset < 13 else jnp.moveaxis(X, axis, -1)
    length, step = x.shape[-1], float(X_scale.reshape(()))
    # The largest element stands for as much as the sum of `length` of them can be without overflow.
    top = max(0.0, math.log(np.finfo(np.float32).max / np.float32(length)) - 5) / step
    table = np.exp((np.arange(-255.0, 1.0) + top) * step).astype(np.float32)
    power = jnp.asarray(table)[255 + x.astype(jnp.int32) - jnp.max(x, -1, keepdims=True).astype(jnp.int32)]
    # onnxruntime adds one after the other, and equal terms meet exact ties.
    total, _ = lax.scan(
        lambda s, term: (s + term, None), jnp.zeros(x.shape[:-1], jnp.float32), jnp.moveaxis(power, -1, 0)
    )
    inverse = jnp.floor(1 / y_scale.reshape(()).astype(np.float32))
    y = _codes(power * inverse / total[..., None], _scalar(y_zero_point), X.dtype)
    return y.reshape(X.shape) if opset < 13 else jnp.moveaxis(y, -1, axis)


@op("QLinearConcat", domain=_MS, layout=("axis",))
def qlinear_concat(Y_scale: Array, Y_zero_point: Array, *xs: Array, axis: int) -> Array:
    parts = [
        _requantize_like(x, s, z, Y_scale, Y_zero_point) for x, s, z in zip(xs[::3], xs[1::3], xs[2::3], strict=True)
    ]
    return jnp.concatenate(parts, axis)


def _requantize_like(x: Array, scale: Array, zero_point: Array, y_scale: Array, y_zero_point: Array) -> Array:
    """Codes of another scale; unchanged where scales and zero points agree."""
    same = (_scalar(scale) == _scalar(y_scale)) & (_scalar(zero_point) == _scalar(y_zero_point))
    return jnp.where(same, x, _quantized(_dequantized(x, scale, zero_point), y_scale, y_zero_point, y_zero_point.dtype))


@op("QLinearWhere", domain=_MS, layout="same")
def qlinear_where(
    condition: Array, X: Array, x_scale: Array, x_zero_point: Array, Y: Array, y_scale: Array, y_zero_point: Array,
    z_scale: Array, z_zero_point: Array,
) -> Array:  # fmt: skip
    x = _requantize_like(X, x_scale, x_zero_point, z_scale, z_zero_point)
    return jnp.where(condition, x, _requantize_like(Y, y_scale, y_zero_point, z_scale, z_zero_point))


@op("QLinearReduceMean", domain=_MS, layout=("axes",))
def qlinear_reduce_mean(
    data: Array, data_scale: Array, data_zero_point: Array | None, reduced_scale: Array,
    reduced_zero_point: Array | None = None, *, axes: Any = None, keepdims: int = 1,
) -> Array:  # fmt: skip
    """Documented by onnxruntime, which has no CPU kernel for it."""
    axes = None if axes is None else tuple(int(a) for a in axes)
    mean = jnp.mean(_dequantized(data, data_scale, data_zero_point), axes, keepdims=bool(keepdims))
    return _quantized(mean, reduced_scale, reduced_zero_point, data.dtype)


def _global_average(x: Array, x_scale: Array, x_zero: Array | None, y_scale: Array, y_zero: Array | None) -> Array:
    axes = tuple(range(1, x.ndim - 1))
    size = math.prod(x.shape[1:-1])
    total = jnp.sum(x, axes, keepdims=True, dtype=jnp.int32)
    total = total if x_zero is None else total - size * _scalar(x_zero).astype(jnp.int32)
    return _requantized(total, _scalar(x_scale) / (_scalar(y_scale) * jnp.float32(size)), y_zero, x.dtype)


@op("QLinearGlobalAveragePool", domain=_MS, layout="last")
def qlinear_global_average_pool(
    X: Array, x_scale: Array, x_zero_point: Array, y_scale: Array, y_zero_point: Array, *, channels_last: int = 0
) -> Array:
    x = layout.channels_first(X) if channels_last else X
    y = _global_average(x, x_scale, x_zero_point, y_scale, y_zero_point)
    return layout.channels_last(y) if channels_last else y


@op("QLinearAveragePool", domain=_MS, layout="last")
def qlinear_average_pool(
    X: Array, x_scale: Array, x_zero_point: Array | None, y_scale: Array, y_zero_point: Array | None = None, *,
    auto_pad: str = "NOTSET", ceil_mode: int = 0, channels_last: int = 0, count_include_pad: int = 0, kernel_shape: Any,
    pads: Any, strides: Any,
) -> Array:  # fmt: skip
    """Float32 sums in the order of the window, as onnxruntime's; over the whole image an integer sum."""
    x = layout.channels_first(X) if channels_last else X
    sizes = x.shape[1:-1]
    strides, _, pads = windows(sizes, kernel_shape, strides, None, pads, auto_pad)
    if tuple(sizes) == tuple(kernel_shape) and not np.any(pads):
        y = _global_average(x, x_scale, x_zero_point, y_scale, y_zero_point)
        return layout.channels_last(y) if channels_last else y
    if ceil_mode:
        each = zip(sizes, kernel_shape, strides, pads, strict=True)
        pads = tuple((lo, hi + _beyond(n, k, s, lo, hi)) for n, k, s, (lo, hi) in each)
    window = (kernel_shape, strides, (1,) * len(sizes), pads, 0)
    total = sum(part for _, part in kernels.taps(_dequantized(x, x_scale, x_zero_point), *window))
    if count_include_pad:
        count = jnp.float32(math.prod(kernel_shape))
    else:
        count = sum(part for _, part in kernels.taps(jnp.ones((1, *sizes, 1), jnp.float32), *window))
    value = divide(divide(total, count), _scalar(y_scale))
    zero = jnp.float32(0) if y_zero_point is None else _scalar(y_zero_point).astype(jnp.float32)
    y = _codes(value + zero, None, X.dtype)
    return layout.channels_last(y) if channels_last else y


def _beyond(size: int, kernel: int, stride: int, low: int, high: int) -> int:
    """How far the last window of `ceil_mode` reaches beyond the padded input; it starts inside the input."""
    steps = -(-(size + low + high - kernel) // stride)
    steps -= steps * stride >= size + low
    return max(0, steps * stride + kernel - size - low - high)
