"""Elementwise arithmetic, comparison, logic and casts."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from onnx import helper

from jq.arithmetic.formats import INT8
from jq.arithmetic.numerics import WIDEST
from jq.errors import ModelError, UnsupportedOp
from jq.graph.schemas import schema
from jq.ops.integer.fixed import FLOAT32_BITS, Fixed, exact, is_power_of_two
from jq.ops.integer.sums import aligned
from jq.ops.table import Array, Context, IntegerContext, Quant, astype, integer, namespace, op


def _is_integer(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.integer)


# --- One operand ---

_UNARY = {  # ONNX name -> the function of that name in numpy and in jax.numpy
    "Abs": "abs", "Neg": "negative", "Sign": "sign", "Floor": "floor", "Ceil": "ceil", "Round": "rint", "Sqrt": "sqrt",
    "Exp": "exp", "Log": "log", "IsNaN": "isnan", "Not": "logical_not", "BitwiseNot": "bitwise_not",
    "Sin": "sin", "Cos": "cos", "Tan": "tan", "Asin": "arcsin", "Acos": "arccos", "Atan": "arctan",
    "Sinh": "sinh", "Cosh": "cosh", "Tanh": "tanh", "Asinh": "arcsinh", "Acosh": "arccosh", "Atanh": "arctanh",
}  # fmt: skip


def _unary(name: str, function: str) -> None:
    @op(name, host=True, layout="same")
    def rule(x: Array) -> Array:
        return getattr(namespace(x), function)(x)


for _name, _function in _UNARY.items():
    _unary(_name, _function)


@op("Reciprocal", host=True, layout="same")
def reciprocal(x: Array) -> Array:
    return 1 / x


@op("Erf", layout="same")
def erf(x: Array) -> Array:
    return lax.erf(x.astype(np.float32) if _is_integer(x) else x).astype(x.dtype)


@op("IsInf", host=True, layout="same")
def is_inf(x: Array, *, detect_negative: int, detect_positive: int) -> Array:
    xp = namespace(x)
    return xp.isinf(x) & (((x > 0) & bool(detect_positive)) | ((x < 0) & bool(detect_negative)))


# --- Two operands ---


def _call(function: str) -> Callable[[Array, Array], Array]:
    return lambda a, b: getattr(namespace(a, b), function)(a, b)


def _divide(a: Array, b: Array) -> Array:
    """Integers truncate, as in C."""
    xp = namespace(a, b)
    if not _is_integer(a):
        return xp.true_divide(a, b)
    return lax.div(*jnp.broadcast_arrays(a, b)) if xp is jnp else (a - np.fmod(a, b)) // b


def _power(a: Array, b: Array) -> Array:
    """The base may be an integer and the exponent a float, and the other way round; the base's type stays."""
    xp = namespace(a, b)
    if xp is jnp and isinstance(b, np.ndarray) and b.ndim == 0:  # XLA knows better ways to square and to root
        return astype(jnp.power(a, b.item()), a.dtype)
    if _is_integer(b) and not _is_integer(a):
        b = astype(b, a.dtype)  # else int64 would widen float32
    return astype(xp.power(a, b), a.dtype)


_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "Add": _call("add"), "Sub": _call("subtract"), "Mul": _call("multiply"), "Div": _divide, "Pow": _power,
    "Equal": _call("equal"), "Greater": _call("greater"), "GreaterOrEqual": _call("greater_equal"),
    "Less": _call("less"), "LessOrEqual": _call("less_equal"),
    "And": _call("logical_and"), "Or": _call("logical_or"), "Xor": _call("logical_xor"),
    "BitwiseAnd": _call("bitwise_and"), "BitwiseOr": _call("bitwise_or"), "BitwiseXor": _call("bitwise_xor"),
}  # fmt: skip


def _binary(name: str, function: Callable[[Array, Array], Array]) -> None:
    quant = Quant(absorbs=name == "Add")

    @op(name, since=7, settled=("b",) if name == "Pow" else (), host=True, layout="same", quant=quant)
    def rule(a: Array, b: Array) -> Array:
        return function(a, b)

    if schema(name, "", 1) is None:
        return

    @op(name, host=True, quant=quant)
    def aligned(a: Array, b: Array, *, axis: int | None = None) -> Array:
        """Before opset 7, `axis` says which axis of `a` the first one of `b` stands for."""
        if axis is not None:
            b = b.reshape(b.shape + (1,) * (a.ndim - axis % max(a.ndim, 1) - b.ndim))
        return function(a, b)


for _name, _binary_function in _BINARY.items():
    _binary(_name, _binary_function)


@op("Mod", host=True, layout="same")
def mod(a: Array, b: Array, *, fmod: int) -> Array:
    xp = namespace(a, b)
    if fmod:
        return xp.fmod(a, b)
    y = xp.mod(a, b)
    # jax.numpy gives a zero the sign of the dividend, numpy and ONNX that of the divisor.
    return y if xp is np or _is_integer(a) else jnp.where(y == 0, jnp.copysign(y, b), y)


@op("BitShift", host=True, layout="same")
def bit_shift(a: Array, b: Array, *, direction: str) -> Array:
    """Shifts by less than 0 or by the width and more leave the sign's extension only."""
    xp, width = namespace(a, b), 8 * a.dtype.itemsize
    inside = (b >= 0) & (b < width)
    zero = xp.zeros((), a.dtype)
    if direction == "LEFT":
        return xp.where(inside, a << xp.where(inside, b, zero), zero)
    shifted = a >> xp.where(inside, b, xp.asarray(width - 1, b.dtype))
    return shifted if jnp.issubdtype(a.dtype, jnp.signedinteger) else xp.where(inside, shifted, zero)


@op("Where", host=True, layout="same", quant=Quant(inputs=("x", "y")))
def where(condition: Array, x: Array, y: Array) -> Array:
    return namespace(condition, x, y).where(condition, x, y)


# --- Any number of operands ---


def _folded(name: str, function: str) -> None:
    @op(name, host=True, layout="same")
    def rule(*data_0: Array) -> Array:
        return functools.reduce(getattr(namespace(*data_0), function), data_0)


for _name, _function in {"Min": "minimum", "Max": "maximum", "Sum": "add"}.items():
    _folded(_name, _function)


@op("Mean", host=True, layout="same")
def mean(*data_0: Array) -> Array:
    return functools.reduce(namespace(*data_0).add, data_0) / len(data_0)


# --- Sums, products and extremes of integers ---


def _integer_folded(name: str, combine: Callable[[Array, Array], Array]) -> None:
    @integer(name, since=7 if name in _BINARY else 1)
    def rule(*data_0: Fixed, ctx: IntegerContext) -> Fixed:
        return aligned(data_0, functools.partial(functools.reduce, combine), ctx.target)


_INTEGER_FOLDS: dict[str, Callable[[Array, Array], Array]] = {
    "Add": operator.add, "Sub": operator.sub, "Sum": operator.add, "Max": jnp.maximum, "Min": jnp.minimum,
}  # fmt: skip
for _name, _combine in _INTEGER_FOLDS.items():
    _integer_folded(_name, _combine)


@integer("Mul", since=7, settled=("a", "b"))
def integer_multiply(a: Fixed, b: Fixed, *, ctx: IntegerContext) -> Fixed:
    """The product of two tensors, or of one with a number, which may change the scale alone."""
    if isinstance(a, Fixed) and isinstance(b, Fixed):
        whole = all(v.is_codes or (v.is_dyadic and not v.waits and v.fraction is None) for v in (a, b))
        room = 1 << FLOAT32_BITS if ctx.target.requantize == "float32" else WIDEST
        if not whole or a.bound * b.bound >= room:
            return NotImplemented
        product = Fixed(a.integers() * b.integers(), a.scale * b.scale, a.bound * b.bound)
        return product.replace(floating=a.floating or b.floating, causes=a.causes | b.causes)
    x, number = (a, b) if isinstance(a, Fixed) else (b, a)
    if not isinstance(number, np.ndarray) or number.size != 1 or number.ndim > x.array.ndim:
        return NotImplemented
    if x.waits or x.fraction is not None or number.dtype != np.float32 or not np.isfinite(number).all():
        return NotImplemented
    factor = exact(number.reshape(()))
    # If float32 is being modelled, it would round the product.
    if factor == 0 or (ctx.target.requantize == "float32" and not is_power_of_two(abs(factor))):
        return NotImplemented
    array = x.integers() if factor > 0 else -x.integers()
    return x.holding(array, scale=x.scale * abs(factor), grid=None, zero=0)


def _integer_sign(name: str, change: Callable[[Array], Array]) -> None:
    @integer(name)
    def rule(x: Fixed) -> Fixed:
        if x.fraction is not None or x.waits:
            return NotImplemented
        return x.holding(change(x.integers()), zero=0, grid=None)


_integer_sign("Neg", operator.neg)
_integer_sign("Abs", jnp.abs)


@op("Einsum")
def einsum(*inputs: Array, equation: str) -> Array:
    return jnp.einsum(equation.replace(" ", ""), *inputs)


def _is_relu(attrs: Mapping[str, Any], operands: Sequence[Any]) -> bool:
    """Whether a Clip is one that the vendor's compiler takes for a ReLU: to [0, 6] or [0, 1], by inputs.

    Others are those to the largest code of 8 bits at a scale below one, from zero or from the least code: a quantizer
    makes such a cut by itself.
    """
    bounds = [float(np.asarray(v).item()) for v in operands[1:3] if v is not None and np.size(v) == 1]
    if len(bounds) != 2:
        return False
    scale, exponent = math.frexp(bounds[1] / INT8.qmax)
    if scale == 0.5 and exponent <= 0 and bounds[0] in (0, math.ldexp(INT8.qmin, exponent - 1)):
        return True
    return any(np.allclose(bounds, (0, high), rtol=1e-6, atol=1e-6) for high in (6, 1))


@op(
    "Clip",
    settled=("min", "max"),
    host=True,
    layout="same",
    cuts=True,
    quant=Quant(inputs=("x",), follows=True, absorbed=_is_relu),
)
def clip(x: Array, min: Array | None = None, max: Array | None = None) -> Array:
    xp = namespace(x, min, max)
    if min is not None:
        x = xp.maximum(x, xp.asarray(min, x.dtype))
    return x if max is None else xp.minimum(x, xp.asarray(max, x.dtype))


@integer("Clip", static=("min", "max"))
def integer_clip(x: Fixed, min: Array | None = None, max: Array | None = None) -> Fixed:
    """Rounding keeps order, so the cut waits for it."""
    ends = []
    for end, none in ((min, -np.inf), (max, np.inf)):
        if end is not None and (np.size(end) != 1 or np.isnan(end).any() or np.any(end == -none)):
            return NotImplemented
        ends.append(None if end is None or np.any(end == none) else exact(np.reshape(end, ())))
    return cut_to(x, *ends)


def cut_to(x: Fixed, low: Fraction | None, high: Fraction | None) -> Fixed:
    """A cut that waits, after the one that waits already."""
    if low is not None and high is not None and low > high:
        return NotImplemented

    def inside(end: Fraction | None) -> Fraction | None:
        if end is None:
            return None
        end = end if low is None else max(end, low)
        return end if high is None else min(end, high)

    return x.replace(low=low if x.low is None else inside(x.low), high=high if x.high is None else inside(x.high))


# --- Casts ---

_FLOAT8 = frozenset(map(np.dtype, ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")))
_NARROW_INTEGERS = frozenset(map(np.dtype, ("int4", "uint4", "int2", "uint2")))


def _bitcast(x: Array, dtype: Any) -> Array:
    return x.view(dtype) if isinstance(x, np.ndarray) else lax.bitcast_convert_type(x, dtype)


def _from_text(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    text = x.astype(np.str_)
    if not jnp.issubdtype(dtype, jnp.integer):
        return text.astype(np.float64).astype(dtype)
    read = np.vectorize(lambda s: int(s) if s.lstrip("+-").isdecimal() else int(float(s)), otypes=[object])
    return read(text).astype(dtype)


def _to_text(x: Array) -> np.ndarray:
    if not isinstance(x, np.ndarray):
        raise UnsupportedOp("a cast to strings needs values that are known while tracing, and these depend on the data")
    return x.astype(np.str_).astype(object)


def _to_e8m0(x: Array, saturate: bool, round_mode: str) -> Array:
    """A power of two as its exponent alone: 2 ** (code - 127), and 255 for NaN. Signs are dropped."""
    xp = namespace(x)
    bits = _bitcast(x.astype(np.float32), np.uint32)
    exponent, fraction = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    least = xp.where(exponent == 0, 0x400000, 0)  # 2 ** -127, code 0, is a subnormal float32
    if round_mode not in ("up", "down", "nearest"):
        raise ModelError(f"round_mode is {round_mode!r}; it must be 'up', 'down' or 'nearest'")
    half = xp.where(exponent == 0, 0x600000, 0x400000)
    rises = {"up": fraction > least, "down": fraction < 0, "nearest": fraction >= half}[round_mode]
    code = exponent + rises
    invalid = (exponent == 255) & (fraction != 0)
    if saturate:
        code = xp.minimum(code, 254)
    else:
        invalid = invalid | (code >= 255) | ((exponent == 0) & (fraction < least))
    return _bitcast(xp.where(invalid, 255, code).astype(np.uint8), np.dtype(ml_dtypes.float8_e8m0fnu))


def _to_float8(x: Array, dtype: np.dtype, saturate: bool, opset: int) -> Array:
    xp, limit = namespace(x), float(ml_dtypes.finfo(dtype).max)
    x = x if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1 else x.astype(np.float32)
    if saturate:
        limited = xp.clip(x, xp.asarray(-limit, x.dtype), xp.asarray(limit, x.dtype))
        # Before opset 24 an infinity became NaN where the type has no infinity and no negative zero.
        x = xp.where(xp.isinf(x), x, limited) if opset < 24 and dtype.name.endswith("uz") else limited
    return x.astype(dtype)


_HALF = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def _cast(x: Array, dtype: np.dtype, saturate: bool, round_mode: str, opset: int) -> Array:
    if dtype.kind in "OUS":
        return _to_text(x)
    if x.dtype == object:
        return _from_text(x, dtype)
    if dtype == ml_dtypes.float8_e8m0fnu:
        return _to_e8m0(x, saturate, round_mode)
    if dtype in _FLOAT8:
        return _to_float8(x, dtype, saturate, opset)
    if dtype in _NARROW_INTEGERS and x.dtype.itemsize > 1:
        x = x.astype(np.int32)  # XLA would saturate a float; higher bits are dropped, as from any integer
    if dtype in _HALF and isinstance(x, jax.Array) and x.dtype == np.float32:
        info = jnp.finfo(dtype)  # XLA keeps the excess precision of a value that is cast back
        x = lax.reduce_precision(x, info.nexp, info.nmant)
    return astype(x, dtype)


@op("Cast", host=True, layout="same")
def cast(x: Array, *, to: int, saturate: int = 1, round_mode: str = "up", ctx: Context) -> Array:
    return _cast(x, np.dtype(helper.tensor_dtype_to_np_dtype(to)), bool(saturate), round_mode, ctx.opset)


@op("CastLike", host=True, layout=())
def cast_like(x: Array, target_type: Array, *, saturate: int = 1, round_mode: str = "up", ctx: Context) -> Array:
    return _cast(x, np.dtype(target_type.dtype), bool(saturate), round_mode, ctx.opset)


@op("BitCast", host=True, layout="same")
def bit_cast(x: Array, *, to: int) -> Array:
    wide = np.dtype(helper.tensor_dtype_to_np_dtype(to))
    if np.bool_ in (x.dtype, wide):
        return x.astype(wide)
    if isinstance(x, np.ndarray) and x.dtype.itemsize == wide.itemsize:
        return x.view(wide)
    if x.dtype.itemsize < wide.itemsize == 8 and x.dtype.kind != wide.kind:  # numbers of 64 bits that have 32 here
        raise UnsupportedOp(
            f"BitCast to {wide} is not supported in a program, where 64-bit numbers have 32 bits; use 32-bit types"
        )
    return _bitcast(x, jax.dtypes.canonicalize_dtype(wide))
