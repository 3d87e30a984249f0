"""onnxruntime's operators on codes: integer products, and its own QLinear operators.

The oracle is onnxruntime, as in `quant`: float32 steps in its order.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jq.arithmetic import kernels, layout
from jq.arithmetic.numerics import divide, rounded
from jq.errors import UnsupportedOp
from jq.graph.domains import MICROSOFT
from jq.ops.convolutions import windows
from jq.ops.quant import codes_of, dequantized, dynamic_quantize_linear, quantized, scalar
from jq.ops.table import Array, Context, op

_ROWS = (-2, -1)  # of a matrix


def _fused(code: Array, ratio: Array, addend: Array) -> Array:
    """`code * ratio + addend` with one rounding, for codes of at most 9 bits, on every backend."""
    high = lax.bitcast_convert_type(lax.bitcast_convert_type(ratio, jnp.int32) & -4096, jnp.float32)
    a, b = code * high, code * (ratio - high)  # both exact
    total = a + addend
    part = total - a
    return total + (((a - (total - part)) + (addend - part)) + b)


# --- Integer convolution and matrix product ---


def _signed(x: Array, zero_point: Array | None) -> tuple[Array, Array]:
    """8-bit codes as int8, with the int32 zero point that goes with them; a known one stays known."""
    if zero_point is None or isinstance(zero_point, np.ndarray):
        zero = np.asarray(0 if zero_point is None else zero_point, np.int32)
    else:
        zero = zero_point.astype(jnp.int32)
    if x.dtype == jnp.int8:
        return x, zero
    if x.dtype != jnp.uint8:
        raise UnsupportedOp(f"its operand is {x.dtype}, but integer products take int8 and uint8; dequantize it first")
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
    (x, x_zero), (w, w_zero) = _signed(x, scalar(x_zero)), _signed(w, w_zero)
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
    return codes_of(total.astype(jnp.float32) * scale.astype(jnp.float32), scalar(zero_point), dtype)


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
    scale = divide(scalar(x_scale) * w_scale, scalar(y_scale))
    return _requantized(total, scale, y_zero_point, x.dtype if y_zero_point is None else y_zero_point.dtype)


@op("QLinearConv", domain=MICROSOFT, weight="w", layout="last", static=("w_zero_point",))
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
    return _requantized(total, divide(a_scale * b_scale, scalar(y_scale)), y_zero_point, y_zero_point.dtype)


@op("MatMulIntegerToFloat", domain=MICROSOFT)
def matmul_integer_to_float(
    A: Array, B: Array, a_scale: Array, b_scale: Array, a_zero_point: Array | None = None,
    b_zero_point: Array | None = None, bias: Array | None = None,
) -> Array:  # fmt: skip
    total = _integer_matmul(A, a_zero_point, B, b_zero_point)
    y = total.astype(jnp.float32) * (a_scale * b_scale)
    return y if bias is None else rounded(y) + bias


@op("DynamicQuantizeMatMul", domain=MICROSOFT)
def dynamic_quantize_matmul(
    A: Array, B: Array, b_scale: Array, b_zero_point: Array | None = None, bias: Array | None = None
) -> Array:
    codes, scale, zero_point = dynamic_quantize_linear(A)
    return matmul_integer_to_float(codes, B, scale, b_scale, zero_point, b_zero_point, bias)


@op("QGemm", domain=MICROSOFT)
def qgemm(
    A: Array, a_scale: Array, a_zero_point: Array, B: Array, b_scale: Array, b_zero_point: Array,
    C: Array | None = None, y_scale: Array | None = None, y_zero_point: Array | None = None, *, alpha: float = 1.0,
    transA: int = 0, transB: int = 0,
) -> Array:  # fmt: skip
    a, b = (A.T if transA else A), (B.T if transB else B)
    total = _integer_matmul(a, a_zero_point, b, b_zero_point)
    total = total if C is None else total + C
    scale = jnp.float32(alpha) * scalar(a_scale) * b_scale
    if y_scale is None:
        return total.astype(jnp.float32) * scale
    dtype = A.dtype if y_zero_point is None else y_zero_point.dtype
    return _requantized(total, divide(scale, scalar(y_scale)), y_zero_point, dtype)


# --- Elementwise, pooling and the rest of com.microsoft ---


def _zero(zero_point: Array | None, dtype: Any) -> Array:
    """A zero point as a number to compute with."""
    return dtype(0) if zero_point is None else scalar(zero_point).astype(dtype)


@op("QLinearAdd", domain=MICROSOFT, layout="same")
def qlinear_add(
    A: Array, A_scale: Array, A_zero_point: Array | None, B: Array, B_scale: Array, B_zero_point: Array | None,
    C_scale: Array, C_zero_point: Array | None = None,
) -> Array:  # fmt: skip
    """Two fused multiply-adds on the codes, the constant part first: onnxruntime's formula on x86."""
    a_ratio, b_ratio = scalar(A_scale) / scalar(C_scale), scalar(B_scale) / scalar(C_scale)
    a_zero, b_zero, c_zero = (_zero(z, jnp.float32) for z in (A_zero_point, B_zero_point, C_zero_point))
    fixed = c_zero - _fused(a_zero, a_ratio, rounded(b_ratio * b_zero))
    a, b = A.astype(jnp.float32), B.astype(jnp.float32)
    return codes_of(_fused(a, a_ratio, _fused(b, b_ratio, fixed)), None, A.dtype)


@op("QLinearMul", domain=MICROSOFT, layout="same")
def qlinear_mul(
    A: Array, A_scale: Array, A_zero_point: Array | None, B: Array, B_scale: Array, B_zero_point: Array | None,
    C_scale: Array, C_zero_point: Array | None = None,
) -> Array:  # fmt: skip
    a, b = (x.astype(jnp.int32) - _zero(z, jnp.int32) for x, z in ((A, A_zero_point), (B, B_zero_point)))
    ratio = scalar(A_scale) * scalar(B_scale) / scalar(C_scale)
    return codes_of(rounded((a * b).astype(jnp.float32) * ratio) + _zero(C_zero_point, jnp.float32), None, A.dtype)


@op("QLinearLeakyRelu", domain=MICROSOFT, layout="same")
def qlinear_leaky_relu(
    X: Array, X_scale: Array, X_zero_point: Array | None, Y_scale: Array, Y_zero_point: Array | None = None, *,
    alpha: float = 0.01,
) -> Array:  # fmt: skip
    x = dequantized(X, X_scale, X_zero_point)
    return quantized(jnp.where(x >= 0, x, x * jnp.float32(alpha)), Y_scale, Y_zero_point, X.dtype)


@op("QLinearSigmoid", domain=MICROSOFT, layout="same")
def qlinear_sigmoid(
    X: Array, X_scale: Array, X_zero_point: Array | None, Y_scale: Array, Y_zero_point: Array | None = None
) -> Array:
    return quantized(jax.nn.sigmoid(dequantized(X, X_scale, X_zero_point)), Y_scale, Y_zero_point, X.dtype)


@op("QLinearSoftmax", domain=MICROSOFT, static=("X_scale", "y_scale"))
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
    start = jnp.zeros(x.shape[:-1], jnp.float32)
    total, _ = lax.scan(lambda s, term: (s + term, None), start, jnp.moveaxis(power, -1, 0))
    inverse = jnp.floor(1 / y_scale.reshape(()).astype(np.float32))
    y = codes_of(power * inverse / total[..., None], scalar(y_zero_point), X.dtype)
    return y.reshape(X.shape) if opset < 13 else jnp.moveaxis(y, -1, axis)


@op("QLinearConcat", domain=MICROSOFT, layout=("axis",))
def qlinear_concat(Y_scale: Array, Y_zero_point: Array, *xs: Array, axis: int) -> Array:
    triples = zip(xs[::3], xs[1::3], xs[2::3], strict=True)
    return jnp.concatenate([_requantize_like(*triple, Y_scale, Y_zero_point) for triple in triples], axis)


def _requantize_like(x: Array, scale: Array, zero_point: Array, y_scale: Array, y_zero_point: Array) -> Array:
    """Codes of another scale; unchanged where scales and zero points agree."""
    same = (scalar(scale) == scalar(y_scale)) & (scalar(zero_point) == scalar(y_zero_point))
    return jnp.where(same, x, quantized(dequantized(x, scale, zero_point), y_scale, y_zero_point, y_zero_point.dtype))


@op("QLinearWhere", domain=MICROSOFT, layout="same")
def qlinear_where(
    condition: Array, X: Array, x_scale: Array, x_zero_point: Array, Y: Array, y_scale: Array, y_zero_point: Array,
    z_scale: Array, z_zero_point: Array,
) -> Array:  # fmt: skip
    x = _requantize_like(X, x_scale, x_zero_point, z_scale, z_zero_point)
    return jnp.where(condition, x, _requantize_like(Y, y_scale, y_zero_point, z_scale, z_zero_point))


@op("QLinearReduceMean", domain=MICROSOFT, layout=("axes",))
def qlinear_reduce_mean(
    data: Array, data_scale: Array, data_zero_point: Array | None, reduced_scale: Array,
    reduced_zero_point: Array | None = None, *, axes: Any = None, keepdims: int = 1,
) -> Array:  # fmt: skip
    """Documented by onnxruntime, which has no CPU kernel for it."""
    axes = None if axes is None else tuple(int(a) for a in axes)
    mean = jnp.mean(dequantized(data, data_scale, data_zero_point), axes, keepdims=bool(keepdims))
    return quantized(mean, reduced_scale, reduced_zero_point, data.dtype)


def _global_average(x: Array, x_scale: Array, x_zero: Array | None, y_scale: Array, y_zero: Array | None) -> Array:
    axes = tuple(range(1, x.ndim - 1))
    size = math.prod(x.shape[1:-1])
    total = jnp.sum(x, axes, keepdims=True, dtype=jnp.int32)
    total = total if x_zero is None else total - size * scalar(x_zero).astype(jnp.int32)
    return _requantized(total, scalar(x_scale) / (scalar(y_scale) * jnp.float32(size)), y_zero, x.dtype)


@op("QLinearGlobalAveragePool", domain=MICROSOFT, layout="last")
def qlinear_global_average_pool(
    X: Array, x_scale: Array, x_zero_point: Array, y_scale: Array, y_zero_point: Array, *, channels_last: int = 0
) -> Array:
    x = layout.channels_first(X) if channels_last else X
    y = _global_average(x, x_scale, x_zero_point, y_scale, y_zero_point)
    return layout.channels_last(y) if channels_last else y


@op("QLinearAveragePool", domain=MICROSOFT, layout="last")
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
    total = sum(part for _, part in kernels.taps(dequantized(x, x_scale, x_zero_point), *window))
    if count_include_pad:
        count = jnp.float32(math.prod(kernel_shape))
    else:
        count = sum(part for _, part in kernels.taps(jnp.ones((1, *sizes, 1), jnp.float32), *window))
    value = divide(divide(total, count), scalar(y_scale))
    y = codes_of(value + _zero(y_zero_point, jnp.float32), None, X.dtype)
    return layout.channels_last(y) if channels_last else y


def _beyond(size: int, kernel: int, stride: int, low: int, high: int) -> int:
    """How far the last window of `ceil_mode` reaches beyond the padded input; it starts inside the input."""
    steps = -(-(size + low + high - kernel) // stride)
    steps -= steps * stride >= size + low
    return max(0, steps * stride + kernel - size - low - high)
