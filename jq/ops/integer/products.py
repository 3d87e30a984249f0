"""Convolutions and matrix products: sums of products in int32, with the terms that are added before rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jq.arithmetic.numerics import WIDEST, round_shift
from jq.npu.targets import PartialSums, Target
from jq.ops.integer.fixed import Fixed, Scale, is_power_of_two, position

Array = Any
Multiply = Callable[[Array, Array, int], Array]  # of integers, weights and what pads the integers, to their sums

_FINEST = 30  # bits below the products' grid that int32 has
_SAME_SCALE = 2.0**-22  # a bias's float32 scale is that of its products, itself rounded
_MOST_WORDS = 1 << 16
_MAGNITUDES = 1 + 2.0**-10  # the error of a float32 sum of float32 magnitudes is far less


def products(
    x: Fixed, w: Fixed, b: Fixed | None, multiply: Multiply, kernel: Array, ones: tuple[int, ...], target: Target, *,
    channel: int, summed: Sequence[int], groups: int = 1, transposed: bool = False,
) -> Fixed:  # fmt: skip
    """Return the exact sums of x times w, plus b; NotImplemented where int32 cannot hold them.

    `multiply` sums products of integers as they are held, in int8 and bilinearly; `kernel` is the weight as it takes it,
    `ones` the shape of a weight that sums the inputs of a group, `summed` the axes of the kernel that are summed over, and
    `channel` ONNX's axis of the outputs.
    """
    if not x.is_codes or w.waits or w.fraction is not None or w.grid is None or w.array.dtype != jnp.int8:
        return NotImplemented
    if w.axis is not None and (w.host is None or w.axis != channel % w.host.ndim):
        return NotImplemented
    depth = math.prod(ones[:-1])
    bound = x.bound * (depth * w.bound if w.host is None else _column_sums(w, channel))
    scale: Scale = x.scale * (np.tile(w.scale, groups) if transposed and isinstance(w.scale, np.ndarray) else w.scale)
    wide = x.array.dtype == jnp.int16
    # Of 16 bits, the sums are rounded until they fit, by at most 7 bits.
    if wide and (x.zero or w.zero or target.requantize != "significand" or depth > _MOST_WORDS):
        return NotImplemented
    if not wide and bound >= WIDEST:
        return NotImplemented

    def signed(image: Array, zero: int) -> Array:
        """Sums of (image - zero) * (w - w.zero)."""
        sums = multiply(image, kernel, zero)
        if zero:
            sums = sums - zero * _columns(w, kernel, summed, channel)
        if w.zero:
            counts = multiply(image, jnp.ones(ones, jnp.int8), zero) - zero * depth
            sums = sums - w.zero * jnp.repeat(counts, kernel.shape[-1] // counts.shape[-1], axis=-1)
        return sums

    result = Fixed(
        x.array, scale, bound, axis=None if isinstance(scale, Fraction) else -1, terms=depth, floating=x.floating or w.floating,
        magnitude=lambda: _magnitudes(x, kernel, w.zero, multiply),
    )  # fmt: skip
    if wide:
        return _from_words(result, signed, b, depth)
    if target.partial_sums is not None and groups == 1 and not transposed:
        halves = _from_partial_sums(result, b, target.partial_sums, x, w, kernel, multiply)
        if halves is not None:
            return halves
    result = result.replace(array=signed(x.array, x.zero))
    return result if b is None else biased(result, b, target)


def _columns(w: Fixed, kernel: Array, summed: Sequence[int], channel: int) -> Array:
    """The sum of the weights for each output; known ones are added up once."""
    if w.host is None or (w.host.ndim > 2 and tuple(summed) == (-2,)):
        return jnp.sum(kernel, tuple(summed), dtype=jnp.int32, keepdims=True)
    others = tuple(a for a in range(w.host.ndim) if a != channel % w.host.ndim)
    return w.host.sum(others, dtype=np.int32)


def _column_sums(w: Fixed, channel: int) -> int:
    """The largest sum of a weight's magnitudes for one output."""
    assert w.host is not None
    magnitudes = np.abs(w.host.astype(np.int64) - w.zero)
    others = tuple(a for a in range(magnitudes.ndim) if a != channel % magnitudes.ndim)
    return int(magnitudes.sum(others).max(initial=0))


@jax.jit
def _float32_magnitudes(image: Array, kernel: Array) -> tuple[Array, Array]:
    """Magnitudes as floats."""
    return jnp.abs(image.astype(jnp.float32)), jnp.abs(kernel.astype(jnp.float32))


def _magnitudes(x: Fixed, kernel: Array, w_zero: int, multiply: Multiply) -> Array:
    """No less than the sum of the absolute products, which no partial sum exceeds in whatever order."""
    image, weight = _float32_magnitudes(x.array.astype(jnp.int32) - x.zero, kernel.astype(jnp.int32) - w_zero)
    return multiply(image, weight, 0) * _MAGNITUDES


def biased(sums: Fixed, b: Fixed, target: Target) -> Fixed:
    """Return the sums plus a bias of its own scale."""
    aligned = _aligned_bias(sums, b)
    if aligned is not None:
        return _plus(sums, *aligned)
    ratio = sums.scale / b.scale if isinstance(sums.scale, Fraction) and isinstance(b.scale, Fraction) else Fraction(1)
    if b.waits or b.fraction is not None or not is_power_of_two(ratio) or ratio <= 1:
        return NotImplemented
    bits = position(1 / ratio)  # that the bias's grid is finer by
    if bits > _FINEST and b.bound >= 1 << _FINEST - 1:
        return NotImplemented
    sums, bits = sums.replace(finest=1 << bits), min(bits, _FINEST)  # beyond it, what there is of a bias is near zero
    integers = b.integers()
    if target.bias_guard is not None and bits > target.bias_guard:
        guard = target.bias_guard
        sums = _finer(sums, guard).replace(causes=sums.causes | {"guard bit"})
        return _plus(sums, integers >> (bits - guard), b.bound >> (bits - guard))
    if (sums.bound << bits) + b.bound < WIDEST:
        return _plus(_finer(sums, bits), integers, b.bound)
    # Where int32 does not hold the finer grid, the rounding decides how much of it matters.
    more = (b.bound >> bits) + 1
    if sums.bound + more >= WIDEST:
        return NotImplemented
    return sums.replace(fraction=(integers, bits), bound=sums.bound + more)


def _finer(sums: Fixed, bits: int) -> Fixed:
    return sums.replace(array=sums.array << bits, scale=sums.scale / 2**bits, bound=sums.bound << bits)


def _aligned_bias(sums: Fixed, b: Fixed) -> tuple[Array, int] | None:
    """A bias on the grid of the products and its largest magnitude, if that grid holds it."""
    if b.waits or b.fraction is not None:
        return None
    ratio = b.scale / sums.scale
    ratios = np.asarray(ratio).reshape(-1)
    if all(abs(float(r) - 1) < _SAME_SCALE for r in ratios):
        return b.integers(), b.bound
    if isinstance(ratio, Fraction) and is_power_of_two(ratio):
        left = -position(ratio)
        return (b.integers() << left, b.bound << left) if left > 0 and b.bound << left < WIDEST else None
    # A bias of an unrelated float scale, to the nearest of the products' steps, as compilers fold it.
    if b.host is None or any(map(is_power_of_two, ratios)):
        return None
    steps = np.rint((b.host.astype(np.float64) - b.zero) * np.asarray(ratio, np.float64))
    most = np.abs(steps).max(initial=0)
    return (jnp.asarray(steps.astype(np.int32)), int(most)) if most < WIDEST else None


def _plus(sums: Fixed, addend: Array, most: int) -> Fixed:
    if sums.bound + most >= WIDEST:
        return NotImplemented
    return sums.replace(array=sums.array + addend, bound=sums.bound + most)


# --- 16-bit operands and 16-bit partial sums ---


def word_shift(depth: int) -> int:
    """Return by how many bits a sum of `depth` products of 16 with 8 bits is rounded to fit 32.

    >>> word_shift(256), word_shift(257), word_shift(1 << 16)
    (0, 1, 7)
    """
    return min(max(24 + (depth - 1).bit_length() - 32, 0), 7)


def _from_words(result: Fixed, signed: Callable[[Array, int], Array], b: Fixed | None, depth: int) -> Fixed:
    """Products of int16 by those of its bytes; the sums are rounded half to even until int32 holds them."""
    shift = word_shift(depth)
    upper = signed((result.array >> 8).astype(jnp.int8), 0)
    lower = signed(((result.array & 255) - 128).astype(jnp.int8), -128)
    if b is not None:
        aligned = _aligned_bias(result, b)
        if aligned is None or aligned[1] >= WIDEST // 2:
            return NotImplemented
        lower = lower + aligned[0]
    # The upper part is even on the grid that is rounded to, so it takes no part in the rounding.
    sums = (upper << (8 - shift)) + round_shift(lower, shift, "half_even")
    scale = result.scale * 2**shift
    causes = frozenset({"accumulator"} if shift else ())
    return result.replace(array=sums, scale=scale, bound=min(WIDEST - 1, result.bound >> shift), causes=causes)


def cascade(first: Sequence[Array], second: Sequence[Array], bias: Array, shift: int) -> Array:
    """Return the sum of two halves of chunks, each held in 16 bits above `shift` between its chunks.

    >>> int(cascade([jnp.int32(1000), jnp.int32(1010)], [jnp.int32(-3), jnp.int32(500)], jnp.int32(8), 4))
    2518
    """

    def held(parts: Sequence[Array]) -> Array:
        total = parts[0]
        for part in parts[1:]:
            short = jnp.clip(round_shift(total, shift, "half_even"), -(1 << 15), (1 << 15) - 1)
            total = (short << shift) + part
        return total

    return held([first[0] + bias, *first[1:]]) + held(second)


def _from_partial_sums(
    result: Fixed, b: Fixed | None, partial: PartialSums, x: Fixed, w: Fixed, kernel: Array, multiply: Multiply
) -> Fixed | None:
    """None where sums are not held so: in the first layer, of other than convolutions, of channels that do not divide."""
    channels, count = x.array.shape[-1], 2 * partial.chunks
    if x.entry or x.zero or w.zero or channels % count or kernel.ndim < 3:
        return None
    images, weights = jnp.split(x.array, count, axis=-1), jnp.split(kernel, count, axis=-2)
    parts = [multiply(image, weight, 0) for image, weight in zip(images, weights, strict=True)]
    bias: Array = jnp.zeros((), jnp.int32)
    if b is not None:
        aligned = _aligned_bias(result, b)
        if aligned is None:
            return None
        bias = aligned[0]
        result = result.replace(bound=result.bound + aligned[1])
    sums = cascade(parts[: partial.chunks], parts[partial.chunks :], bias, partial.shift)
    return result.replace(array=sums, bound=2 * result.bound, causes=frozenset({"psum"}))
