"""Activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jq.arithmetic.formats import INT8
from jq.npu.facts import is_hard_sigmoid
from jq.ops.elementwise import cut_to, integer_multiply
from jq.ops.integer.fixed import Fixed, Grid, Scale, exact, position
from jq.ops.integer.rounding import quantize
from jq.ops.table import Array, IntegerContext, Quant, integer, op


def _always(attrs: Mapping[str, Any], operands: Sequence[Any]) -> bool:
    return True


@op("Relu", layout="same", cuts=True, quant=Quant(follows=True, absorbed=_always))
def relu(x: Array) -> Array:
    return jax.nn.relu(x)


@integer("Relu")
def integer_relu(x: Fixed) -> Fixed:
    return cut_to(x, Fraction(0), None)


@op("LeakyRelu", layout="same", quant=Quant(absorbed=_always))
def leaky_relu(x: Array, *, alpha: float) -> Array:
    return jnp.where(x < 0, alpha * x, x)


@integer("LeakyRelu")
def integer_leaky_relu(x: Fixed, *, alpha: float, ctx: IntegerContext) -> Fixed:
    if x.is_codes and ctx.target.requantize == "float32":
        return NotImplemented  # float32 rounds the products, which a table of them repeats
    return _sloped(x, exact(np.float32(alpha)), ctx.target.slope, ctx.target.slope_shift)


def _sloped(x: Fixed, slope: Scale, fixed: Fraction | None, shift: int | None) -> Fixed:
    """A slope of negative values waits for the rounding; a chip has a fixed one, or one of `shift` bits."""
    if x.waits or np.any(slope < 0) or (x.fraction is not None and isinstance(slope, np.ndarray)):
        return NotImplemented
    held: Scale = slope if fixed is None else fixed
    if fixed is None and shift is not None:
        held = np.vectorize(lambda s: Fraction(round(s * 2**shift), 2**shift), otypes=[object])(slope)
        held = held.item() if held.ndim == 0 else held
    causes = x.causes | ({"constant"} if np.any(held != slope) else set())
    return x.replace(slope=held, causes=causes)


@op("PRelu", since=7, layout="same", quant=Quant(absorbed=_always))
def prelu(x: Array, slope: Array) -> Array:
    return jnp.where(x < 0, slope * x, x)


@integer("PRelu", since=7)
def integer_prelu(x: Fixed, slope: Fixed, *, ctx: IntegerContext) -> Fixed:
    """Slopes are known, one for all or one for each channel."""
    if not isinstance(slope, Fixed) or slope.host is None or not isinstance(slope.scale, Fraction):
        return NotImplemented
    values = np.vectorize(lambda code: (int(code) - slope.zero) * slope.scale, otypes=[object])(slope.host)
    if max(slope.array.shape[:-1], default=1) > 1 or slope.array.ndim > x.array.ndim:
        return NotImplemented
    return _sloped(x, values.item() if values.size == 1 else values.reshape(-1), None, None)


@op("PRelu", quant=Quant(absorbed=_always))
def prelu_by_channel(x: Array, slope: Array) -> Array:
    """Before opset 7 the slope is one number, or one per channel."""
    return prelu(x, slope.reshape(-1, *(1,) * (x.ndim - 2)))


@op("ThresholdedRelu", layout="same")
def thresholded_relu(x: Array, *, alpha: float) -> Array:
    return jnp.where(x > alpha, x, jnp.zeros((), x.dtype))


@op("Elu", layout="same")
def elu(x: Array, *, alpha: float) -> Array:
    return jax.nn.elu(x, alpha)


@op("Celu", layout="same")
def celu(x: Array, *, alpha: float) -> Array:
    return jax.nn.celu(x, alpha)


@op("Selu", layout="same")
def selu(x: Array, *, alpha: float, gamma: float) -> Array:
    return gamma * jax.nn.elu(x, alpha)


def _plain(name: str, function: Callable[[Array], Array]) -> None:
    @op(name, layout="same")
    def rule(x: Array) -> Array:
        return function(x)


_plain("Sigmoid", jax.nn.sigmoid)
_plain("Softplus", jax.nn.softplus)
_plain("Softsign", jax.nn.soft_sign)
_plain("Mish", jax.nn.mish)


@op("HardSigmoid", layout="same", quant=Quant(when=lambda attrs, operands: is_hard_sigmoid(attrs)))
def hard_sigmoid(x: Array, *, alpha: float, beta: float) -> Array:
    return jnp.clip(alpha * x + beta, 0, 1)


@integer("HardSigmoid")
def integer_hard_sigmoid(x: Fixed, *, alpha: float, beta: float, ctx: IntegerContext) -> Fixed:
    """The chip's, of slope 1/6: 1 is no upper end to it, the output's type is."""
    if ctx.target.hard_sigmoid is None or not is_hard_sigmoid({"alpha": alpha, "beta": beta}):
        return NotImplemented
    return _chips_hard_sigmoid(x, *ctx.target.hard_sigmoid)


def _chips_hard_sigmoid(x: Fixed, multiplier: int, shift: int) -> Fixed:
    if not x.is_codes or not x.is_dyadic or not 0 <= position(x.scale) <= 15:
        return NotImplemented
    three = 3 * multiplier << position(x.scale)
    y = jnp.maximum(multiplier * x.integers() + three, 0)
    return Fixed(y, x.scale / 2**shift, multiplier * x.bound + three, causes=frozenset({"constant"}))


@op("HardSwish", layout="same")
def hard_swish(x: Array) -> Array:
    return x * jnp.clip(x * (1 / 6) + 0.5, 0, 1)


@integer("HardSwish")
def integer_hard_swish(x: Fixed, *, ctx: IntegerContext) -> Fixed:
    """The chip rounds the hard sigmoid to int8 at position 7, and the product with it once more."""
    if ctx.target.hard_sigmoid is None:
        return NotImplemented
    gate = _chips_hard_sigmoid(x, *ctx.target.hard_sigmoid)
    if gate is NotImplemented:
        return NotImplemented
    if (rounded_gate := quantize(gate, Grid(Fraction(1, 128), 0, INT8), ctx.target)) is None:
        return NotImplemented
    product = integer_multiply(x, rounded_gate.replace(coded=False), ctx=ctx)
    return product if product is NotImplemented else product.replace(causes=frozenset({"constant"}))


@op("Swish", layout="same")
def swish(x: Array, *, alpha: float) -> Array:
    return x * jax.nn.sigmoid(alpha * x)


@op("SwiGLU", layout="same")
def swiglu(a: Array, b: Array, *, alpha: float) -> Array:
    return swish(a, alpha=alpha) * b


@op("Gelu", layout="same")
def gelu(x: Array, *, approximate: str = "none") -> Array:
    if approximate == "tanh":
        return jax.nn.gelu(x, approximate=True)
    # By erf, as ONNX has it. The erfc of jax.nn is slower, and exact only where the value is next to 0.
    return 0.5 * x * (1 + lax.erf(x * math.sqrt(0.5)))


@op("QuickGelu", domain="com.microsoft", layout="same")
def quick_gelu(x: Array, *, alpha: float = 1.702) -> Array:
    return swish(x, alpha=alpha)


@op("Gelu", domain="com.microsoft", layout="same")
def microsoft_gelu(x: Array) -> Array:
    return gelu(x)


@op("BiasGelu", domain="com.microsoft", layout="same")
def bias_gelu(a: Array, b: Array) -> Array:
    return gelu(a + b)


@op("FastGelu", domain="com.microsoft", layout="same")
def fast_gelu(x: Array, bias: Array | None = None) -> Array:
    return gelu(x if bias is None else x + bias, approximate="tanh")


@op("Shrink", layout="same")
def shrink(x: Array, *, bias: float, lambd: float) -> Array:
    return jnp.where(x < -lambd, x + bias, jnp.where(x > lambd, x - bias, 0)).astype(x.dtype)
