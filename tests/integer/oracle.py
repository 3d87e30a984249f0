"""What a chip's integers are, in whole numbers and fractions of Python, from the description of its arithmetic.

Nothing of jq is used here. A program is a list of steps, each of which reads quantized tensors, computes exactly and
rounds once. An element whose float32 could come out on the other side of a rounding is not sure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

Ints = np.ndarray  # of dtype object, so that nothing overflows
HALF = Fraction(1, 2)
FEW = 1 << 24  # below that, float32 has every integer
WIDE = 1 << 30  # what an accumulator of 32 bits holds where it is doubled once
NEAR = Fraction(1, 20000)  # of an output's step: what float32 may be off by


class NoForm(Exception):
    """The description has no integer form for this step."""


@dataclass(frozen=True)
class Chip:
    rounding: str
    bias_guard: int | None = None
    add_guard: int | None = None
    reciprocals: bool = True
    slope: Fraction | None = None
    slope_bits: int | None = 8
    sixes: bool = True  # ReLU6 cuts at 96 up to position 4, and the hard sigmoid has 2731 / 2**14
    floats: bool = False  # what is not exact is float32


CHIPS = {
    "ort": Chip("half_even", reciprocals=False, slope_bits=None, sixes=False, floats=True),
    "dpu": Chip("half_up", bias_guard=1, add_guard=2, slope=Fraction(26, 256)),
    "aie2_x1": Chip("half_up", add_guard=7),
    "aie2_even": Chip("half_even", add_guard=7),
}


@dataclass(frozen=True)
class Grid:
    position: int
    unsigned: bool = False
    zero: int = 0  # as the file has it

    @property
    def ends(self) -> tuple[int, int]:
        """Of the integers less their zero point."""
        low = 0 if self.unsigned else -128
        return low - self.zero, low + 255 - self.zero

    @property
    def most(self) -> int:
        return max(map(abs, self.ends))


@dataclass(frozen=True)
class Constant:
    integers: np.ndarray  # less their zero point
    position: int | tuple[int, ...]  # or one per channel


@dataclass(frozen=True)
class Source:
    name: str
    array: np.ndarray  # integers as the file has them, or floats that are quantized first
    grid: Grid


@dataclass(frozen=True)
class Activation:
    kind: str  # Relu, Clip, LeakyRelu or PRelu
    slope: float = 0.0
    slopes: Constant | None = None  # in a shape that broadcasts to (channels, *spatial)


@dataclass(frozen=True)
class Step:
    op: str
    inputs: tuple[str, ...]
    output: str
    grid: Grid
    attrs: Mapping[str, Any] = field(default_factory=dict)
    weight: Constant | None = None
    bias: Constant | None = None
    activation: Activation | None = None


@dataclass(frozen=True)
class Program:
    sources: tuple[Source, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Found:
    """The integers of a tensor less their zero point, and which of them are sure."""

    integers: Ints
    sure: np.ndarray
    grid: Grid


@dataclass(frozen=True)
class Exact:
    """What a step computes, before it is rounded."""

    values: Ints  # Fractions, in real units
    sure: np.ndarray | None = None  # None: all
    inexact: bool = False  # in float32, so that what lies near a boundary is not sure
    room: int = 1  # the largest integer that the accumulator has to hold for the activation


# ---------------------------------------------------------------------------------------------
# Rounding
# ---------------------------------------------------------------------------------------------


def power(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


def rounded(number: Fraction | int, mode: str) -> int:
    below = math.floor(number)
    rest = number - below
    if mode == "floor" or rest < HALF:
        return below
    if rest > HALF:
        return below + 1
    up = {"half_up": True, "half_even": below % 2 == 1, "half_away": number > 0}[mode]
    return below + up


def saturated(number: int, grid: Grid) -> int:
    low, high = grid.ends
    return min(max(number, low), high)


def each(function: Callable[..., Any], *arrays: Any) -> Ints:
    found = np.frompyfunc(function, len(arrays), 1)(*arrays)
    return np.asarray(found, object)


def whole(array: np.ndarray) -> Ints:
    return each(int, np.asarray(array))


# ---------------------------------------------------------------------------------------------
# Steps
# ---------------------------------------------------------------------------------------------


def evaluate(
    program: Program, chip: Chip, settle: Callable[[str, Found], Ints] = lambda name, found: found.integers
) -> dict[str, Found]:
    """The tensors of a program; `settle` says with what integers the steps go on that read one."""
    tensors: dict[str, Found] = {}

    def keep(name: str, found: Found) -> None:
        tensors[name] = Found(settle(name, found), found.sure, found.grid)

    for source in program.sources:
        grid = source.grid
        if source.array.dtype.kind == "f":
            exact = Exact(each(lambda v: Fraction(float(v)), source.array))
            keep(source.name, quantized(exact, grid, chip, None))
        else:
            integers = whole(source.array) - grid.zero
            keep(source.name, Found(integers, np.ones(integers.shape, bool), grid))
    for step in program.steps:
        operands = [tensors[name] for name in step.inputs]
        keep(step.output, quantized(computed(step, operands, chip), step.grid, chip, step.activation))
    return tensors


def computed(step: Step, operands: Sequence[Found], chip: Chip) -> Exact:
    return _STEPS[step.op](step, operands, chip)


def quantized(exact: Exact, grid: Grid, chip: Chip, activation: Activation | None) -> Found:
    """Activated, rounded once and saturated."""
    steps = each(lambda v: v * power(grid.position), exact.values)
    inexact = exact.inexact
    if activation is not None:
        steps, loses = activated(steps, grid, chip, activation, exact.room)
        inexact |= loses
    integers = each(lambda v: saturated(rounded(v, chip.rounding), grid), steps)
    sure = np.ones(steps.shape, bool) if exact.sure is None else exact.sure
    if inexact:
        sure = sure & ~each(lambda v: is_near(v, grid), steps).astype(bool)
    return Found(integers, sure, grid)


def is_near(number: Fraction, grid: Grid) -> bool:
    """Whether float32 may round it otherwise; what is itself a boundary, float32 has exactly."""
    low, high = grid.ends
    off = abs(number - math.floor(number) - HALF)
    return 0 < off < NEAR and low - 1 < number < high + 1


def activated(steps: Ints, grid: Grid, chip: Chip, activation: Activation, room: int) -> tuple[Ints, bool]:
    """Output steps with an activation on them, and whether float32 loses bits in that."""
    match activation.kind:
        case "Relu":
            return each(lambda v: max(v, Fraction(0)), steps), False
        case "Clip":
            six = 6 * power(grid.position)
            if chip.sixes and grid.position <= 4:  # beyond, int8 saturates below it
                six = Fraction(96)
            steps = each(lambda v: max(v, Fraction(0)), steps)
            return each(lambda v: min(v, six), steps), False
    if room >= WIDE:
        raise NoForm("an accumulator that a slope reads would have to be wider")
    if activation.kind == "LeakyRelu":
        slope = Fraction(float(np.float32(activation.slope)))
        if chip.slope is not None:
            slope = chip.slope
        elif chip.slope_bits is not None:
            slope = rounded(slope * power(chip.slope_bits), "half_even") * power(-chip.slope_bits)
        slopes = np.array(slope, object)
    else:
        assert activation.slopes is not None
        assert isinstance(activation.slopes.position, int)
        slopes = each(lambda k: int(k) * power(-activation.slopes.position), activation.slopes.integers)
    return each(lambda v, s: v * s if v < 0 else v, steps, slopes), chip.floats


# ---------------------------------------------------------------------------------------------
# Sums of products
# ---------------------------------------------------------------------------------------------


def _real(found: Found) -> Ints:
    return each(lambda k: k * power(-found.grid.position), found.integers)


def _products(step: Step, x: Found, sums: Ints, magnitudes: int, chip: Chip, channel: int = 1) -> Exact:
    """Sums of products with a weight, and a bias; `magnitudes` is the largest sum of a column of weights."""
    assert step.weight is not None
    positions = np.asarray(np.array(step.weight.position, object) + x.grid.position, object)
    if positions.ndim:
        positions = positions.reshape(-1, *(1,) * (sums.ndim - 1 - channel))
    most = x.grid.most * magnitudes
    if most >= WIDE:
        raise NoForm("products beyond 32 bits")
    sloped = step.activation is not None and step.activation.kind in ("LeakyRelu", "PRelu")
    if positions.ndim and sloped and not chip.floats:
        raise NoForm("a slope on a scale per channel, which the device does not have")
    values = each(lambda v, p: v * power(-p), sums, positions)
    if step.bias is None:
        return Exact(values, sure=_few(sums, chip), room=most)
    if positions.ndim:  # 32 bits, on the grid of the products
        return Exact(
            values + each(lambda b, p: int(b) * power(-p), _along(step.bias, sums, channel), positions), room=most
        )
    shift = int(positions) - step.bias.position
    largest = int(np.abs(step.bias.integers).max(initial=0))
    guard = max(-shift, 0) if chip.bias_guard is None else min(max(-shift, 0), chip.bias_guard)
    if (most if shift < 0 else most + largest * 2**shift) >= WIDE or (shift >= 0 and largest << shift >= WIDE):
        raise NoForm("a bias beyond 32 bits")

    def held(b: int) -> Fraction:
        exact = b * power(shift)
        return exact if shift >= 0 else Fraction(math.floor(exact * 2**guard), 2**guard)

    bias = each(held, _along(step.bias, sums, channel))
    sure = _few(each(lambda v, b: (abs(v) + abs(b)) * 2 ** max(-shift, 0), sums, bias), chip)
    return Exact(
        each(lambda v, b: (v + b) * power(-int(positions)), sums, bias),
        sure=sure,
        room=(most << guard) + largest if shift < 0 else most,
    )


def _along(bias: Constant, sums: Ints, channel: int) -> Ints:
    return whole(bias.integers).reshape(-1, *(1,) * (sums.ndim - 1 - channel))


def _few(sums: Ints, chip: Chip) -> np.ndarray | None:
    return each(lambda v: abs(v) < FEW, sums).astype(bool) if chip.floats else None


def _pairs(pads: Sequence[int]) -> list[tuple[int, int]]:
    half = len(pads) // 2
    return list(zip(pads[:half], pads[half:], strict=True))


def _windows(
    x: Ints, kernel: Sequence[int], attrs: Mapping[str, Any], fill: int
) -> Iterator[tuple[tuple[int, ...], Ints]]:
    """Where an output is, and what it reads: (n, channels, taps)."""
    rank = len(kernel)
    strides, dilations = attrs.get("strides", [1] * rank), attrs.get("dilations", [1] * rank)
    x = np.pad(x, [(0, 0), (0, 0), *_pairs(attrs.get("pads", [0] * 2 * rank))], constant_values=fill)
    reaches = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    counts = [(n - r) // s + 1 for n, r, s in zip(x.shape[2:], reaches, strides, strict=True)]
    for place in itertools.product(*map(range, counts)):
        cut = [slice(p * s, p * s + r, d) for p, s, r, d in zip(place, strides, reaches, dilations, strict=True)]
        taken = x[(slice(None), slice(None), *cut)]
        yield place, taken.reshape(*taken.shape[:2], -1)


def _at_places(parts: Sequence[tuple[tuple[int, ...], Ints]]) -> Ints:
    shape = [p + 1 for p in parts[-1][0]]
    found = np.empty((*parts[0][1].shape, *shape), object)
    for place, part in parts:
        found[(slice(None), slice(None), *place)] = part
    return found


def _conv(step: Step, operands: Sequence[Found], chip: Chip) -> Exact:
    (x,), w = operands, whole(step.weight.integers)
    group = step.attrs.get("group", 1)
    rows = w.reshape(group, w.shape[0] // group, -1)

    def sums(taken: Ints) -> Ints:
        parts = taken.reshape(taken.shape[0], group, -1)
        return np.concatenate([parts[:, g].dot(rows[g].T) for g in range(group)], axis=1)

    found = _at_places([(p, sums(t)) for p, t in _windows(x.integers, w.shape[2:], step.attrs, 0)])
    return _products(step, x, found, int(np.abs(w).reshape(w.shape[0], -1).sum(1).max()), chip)


def _conv_transpose(step: Step, operands: Sequence[Found], chip: Chip) -> Exact:
    (x,), w, group = operands, whole(step.weight.integers), step.attrs.get("group", 1)
    kernel, rank = w.shape[2:], w.ndim - 2
    strides, dilations = step.attrs.get("strides", [1] * rank), step.attrs.get("dilations", [1] * rank)
    more, cuts = step.attrs.get("output_padding", [0] * rank), _pairs(step.attrs.get("pads", [0] * 2 * rank))
    full = [
        (n - 1) * s + (k - 1) * d + 1 + m
        for n, s, k, d, m in zip(x.integers.shape[2:], strides, kernel, dilations, more, strict=True)
    ]
    depth, outputs = w.shape[0] // group, w.shape[1]
    found = np.zeros((x.integers.shape[0], group * outputs, *full), object)
    for g in range(group):
        own, to = slice(g * depth, (g + 1) * depth), slice(g * outputs, (g + 1) * outputs)
        for place in np.ndindex(*x.integers.shape[2:]):
            for tap in np.ndindex(*kernel):
                at = [p * s + t * d for p, s, t, d in zip(place, strides, tap, dilations, strict=True)]
                product = x.integers[(slice(None), own, *place)].dot(w[(own, slice(None), *tap)])
                found[(slice(None), to, *at)] += product
    found = found[(slice(None), slice(None), *(slice(a, n - b) for n, (a, b) in zip(full, cuts, strict=True)))]
    magnitudes = max(int(abs(w[g * depth : (g + 1) * depth]).sum((0, *range(2, w.ndim))).max()) for g in range(group))
    return _products(step, x, found, magnitudes, chip)


def _gemm(step: Step, operands: Sequence[Found], chip: Chip) -> Exact:
    (x,), w = operands, whole(step.weight.integers)
    w = w.T if step.attrs.get("transB") else w
    a = x.integers.T if step.attrs.get("transA") else x.integers
    return _products(step, x, a.dot(w), int(abs(w).sum(0).max()), chip)


def _matmul(step: Step, operands: Sequence[Found], chip: Chip) -> Exact:
    if step.weight is not None:
        (x,), w = operands, whole(step.weight.integers)
        sums = np.matmul(x.integers, w)
        return _products(step, x, sums, int(abs(w).sum(-2).max()), chip, channel=sums.ndim - 1)
    a, b = operands
    sums = np.matmul(a.integers, b.integers)
    scale = power(-a.grid.position - b.grid.position)
    return Exact(each(lambda v: v * scale, sums), sure=_few(sums, chip))


# ---------------------------------------------------------------------------------------------
# Elements of several tensors
# ---------------------------------------------------------------------------------------------


def _aligned(step: Step, operands: Sequence[Found], chip: Chip) -> Exact:
    combine: Callable[..., Any] = {"Add": _sum, "Sum": _sum, "Sub": lambda a, b: a - b, "Max": max, "Min": min}[step.op]
    positions = [x.grid.position for x in operands]
    coarsest, finest = min(positions), max(positions)
    fine = finest if chip.add_guard is None else min(finest, coarsest + chip.add_guard)
    if sum(x.grid.most * 2 ** max(fine - x.grid.position, 0) for x in operands) >= WIDE:
        raise NoForm("a sum beyond 32 bits")
    parts = [each(lambda k, s=fine - x.grid.position: math.floor(k * power(s)), x.integers) for x in operands]
    total = each(lambda *v: combine(*v), *parts)
    magnitudes = each(lambda *v: sum(map(abs, v)), *parts)
    room = sum(x.grid.most * 2 ** max(fine - x.grid.position, 0) for x in operands)
    return Exact(each(lambda v: v * power(-fine), total), sure=_few(magnitudes, chip), room=room)


def _sum(*parts: int) -> int:
    return sum(parts)


def _mul(step: Step, operands: Sequence[Found], chip: Chip) -> Exact:
    return Exact(each(lambda a, b: a * b, *map(_real, operands)))


def _concat(step: Step, operands: Sequence[Found], chip: Chip) -> Exact:
    positions = [x.grid.position for x in operands]
    if sum(x.grid.most << (max(positions) - x.grid.position) for x in operands) >= WIDE:
        raise NoForm("a shift beyond 32 bits")
    return Exact(np.concatenate([_real(x) for x in operands], axis=step.attrs["axis"]))


# ---------------------------------------------------------------------------------------------
# Means
# ---------------------------------------------------------------------------------------------


def one_over(count: int) -> Fraction:
    """The first of the best quotients by a power of two."""
    best, off = Fraction(0), Fraction(2)
    for shift in range(math.ceil(math.log2(128 * count))):
        found = Fraction(rounded(Fraction(2**shift, count), "half_even"), 2**shift)
        if abs(found - Fraction(1, count)) < off:
            best, off = found, abs(found - Fraction(1, count))
    return best


_WIRED = {3: Fraction(7, 64), 5: Fraction(10, 256), 6: Fraction(7, 256), 7: Fraction(21, 1024), 14: Fraction(21, 4096)}


def one_over_window(kernel: Sequence[int]) -> Fraction:
    if len(kernel) == 2 and kernel[0] == kernel[1] and kernel[0] in _WIRED:
        return _WIRED[kernel[0]]
    return one_over(math.prod(kernel))


def _mean(x: Found, sums: Ints, count: int, factor: Fraction, chip: Chip) -> Exact:
    scale = power(-x.grid.position) * (factor if chip.reciprocals else Fraction(1, count))
    return Exact(each(lambda v: v * scale, sums), inexact=chip.floats)


def _average_pool(step: Step, operands: Sequence[Found], chip: Chip) -> Exact:
    (x,), kernel = operands, step.attrs["kernel_shape"]
    if any(step.attrs.get("pads", ())) and not step.attrs.get("count_include_pad"):
        raise NoForm("the device divides by the whole kernel")
    sums = _at_places([(p, t.sum(-1)) for p, t in _windows(x.integers, kernel, step.attrs, 0)])
    return _mean(x, sums, math.prod(kernel), one_over_window(kernel), chip)


def _global_average_pool(step: Step, operands: Sequence[Found], chip: Chip) -> Exact:
    (x,) = operands
    axes, window = tuple(range(2, x.integers.ndim)), x.integers.shape[2:]
    return _mean(x, x.integers.sum(axes, keepdims=True), math.prod(window), one_over_window(window), chip)


def _reduce_mean(step: Step, operands: Sequence[Found], chip: Chip) -> Exact:
    (x,), axes = operands, tuple(step.attrs["axes"])
    sizes = [x.integers.shape[a] for a in axes]
    sums = x.integers.sum(axes, keepdims=bool(step.attrs.get("keepdims", 1)))
    return _mean(x, sums, math.prod(sizes), math.prod(map(one_over, sizes)), chip)


# ---------------------------------------------------------------------------------------------
# Elements that move
# ---------------------------------------------------------------------------------------------


def _moved(move: Callable[[Ints, Mapping[str, Any]], Ints]) -> Callable[[Step, Sequence[Found], Chip], Exact]:
    return lambda step, operands, chip: Exact(move(_real(operands[0]), step.attrs))


def _max_pool(step: Step, operands: Sequence[Found], chip: Chip) -> Exact:
    (x,) = operands
    parts = _windows(x.integers, step.attrs["kernel_shape"], step.attrs, x.grid.ends[0])
    most = _at_places([(p, t.max(-1)) for p, t in parts])
    return Exact(each(lambda k: k * power(-x.grid.position), most))


def _padded(x: Ints, attrs: Mapping[str, Any]) -> Ints:
    if attrs["mode"] == "constant":
        return np.pad(x, _pairs(attrs["pads"]), constant_values=Fraction(0))
    return np.pad(x, _pairs(attrs["pads"]), mode=attrs["mode"])


def _sliced(x: Ints, attrs: Mapping[str, Any]) -> Ints:
    return x[tuple(slice(*part) for part in attrs["slices"])]


def _resized(x: Ints, attrs: Mapping[str, Any]) -> Ints:
    """Asymmetric, floor: the element at floor(o / scale)."""
    for axis, scale in zip((2, 3), attrs["scales"], strict=True):
        count = math.floor(x.shape[axis] * scale)
        x = np.take(x, [math.floor(Fraction(o) / scale) for o in range(count)], axis)
    return x


# ---------------------------------------------------------------------------------------------
# Functions
# ---------------------------------------------------------------------------------------------


def _gate(x: Found, chip: Chip) -> Ints:
    """The hard sigmoid of a chip: no upper end but what 32 bits have."""
    if not 0 <= x.grid.position <= 15:
        raise NoForm("a hard sigmoid at a position that the device does not take")
    three = 3 * 2731 << x.grid.position
    top = 1 << 32
    return each(lambda k: min(top, max(0, 2731 * k + three)) * power(-14 - x.grid.position), x.integers)


def _hard_sigmoid(step: Step, operands: Sequence[Found], chip: Chip) -> Exact:
    (x,) = operands
    if chip.sixes:
        return Exact(_gate(x, chip))
    sixth = Fraction(float(np.float32(1 / 6)))
    return Exact(each(lambda v: min(max(v * sixth + HALF, Fraction(0)), Fraction(1)), _real(x)), inexact=True)


def _hard_swish(step: Step, operands: Sequence[Found], chip: Chip) -> Exact:
    (x,) = operands
    if chip.sixes:
        gate = quantized(Exact(_gate(x, chip)), Grid(7), chip, None)
        return Exact(each(lambda v, h: v * h, _real(x), _real(gate)))
    sixth = Fraction(float(np.float32(1 / 6)))
    return Exact(each(lambda v: v * min(max(v * sixth + HALF, Fraction(0)), Fraction(1)), _real(x)), inexact=True)


def _exp(v: float) -> float:
    return math.exp(min(v, 80.0))


def _tabulated(function: Callable[[float], float]) -> Callable[[Step, Sequence[Found], Chip], Exact]:
    return lambda step, operands, chip: Exact(
        each(lambda v: Fraction(function(float(v))), _real(operands[0])), inexact=True
    )


_STEPS: dict[str, Callable[[Step, Sequence[Found], Chip], Exact]] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Gemm": _gemm,
    "MatMul": _matmul,
    **dict.fromkeys(("Add", "Sum", "Sub", "Max", "Min"), _aligned),
    "Mul": _mul,
    "Concat": _concat,
    "AveragePool": _average_pool,
    "GlobalAveragePool": _global_average_pool,
    "ReduceMean": _reduce_mean,
    "MaxPool": _max_pool,
    "Pad": _moved(_padded),
    "Slice": _moved(_sliced),
    "Transpose": _moved(lambda x, attrs: x.transpose(attrs["perm"])),
    "Reshape": _moved(lambda x, attrs: x.reshape(attrs["shape"])),
    "Resize": _moved(_resized),
    "Identity": _moved(lambda x, attrs: x),  # of which an activation is all there is
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _hard_swish,
    "Sigmoid": _tabulated(lambda v: 1 / (1 + _exp(-v))),
    "Tanh": _tabulated(math.tanh),
    "Exp": _tabulated(_exp),
}
