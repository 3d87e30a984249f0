"""Random quantized graphs: the integers of every tensor against exact arithmetic, for each target.

`JQ_SOAK=5000 pytest tests/integer/test_graphs.py -n0 -s` draws as many other graphs, of a seed that it prints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import jq
from tests.integer.oracle import (
    CHIPS,
    Activation,
    Constant,
    Found,
    Grid,
    NoForm,
    Program,
    Source,
    Step,
    computed,
    evaluate,
    quantized,
)

SOAK = int(os.environ.get("JQ_SOAK", 0))
EVERY = settings(
    max_examples=SOAK or 10,
    derandomize=not SOAK,
    deadline=None,
    database=None,
    print_blob=bool(SOAK),
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate, Phase.shrink),
)


# ---------------------------------------------------------------------------------------------
# A program as an ONNX model
# ---------------------------------------------------------------------------------------------


class _Model:
    def __init__(self, program: Program) -> None:
        self.nodes: list[Any] = []
        self.arrays: dict[str, np.ndarray] = {}
        self.inputs: list[Any] = []
        self.grids: dict[str, Grid] = {}
        self.feeds: dict[str, np.ndarray] = {}
        for source in program.sources:
            self._source(source)
        for step in program.steps:
            self._step(step)
        last = program.steps[-1]
        kind = TensorProto.UINT8 if last.grid.unsigned else TensorProto.INT8
        self.proto = helper.make_model(
            helper.make_graph(
                self.nodes,
                "program",
                self.inputs,
                [helper.make_tensor_value_info(last.output, kind, None)],
                [numpy_helper.from_array(array, name) for name, array in self.arrays.items()],
            ),
            opset_imports=[helper.make_opsetid("", 17)],
            ir_version=9,
        )

    def constant(self, array: Any) -> str:
        name = f"c{len(self.arrays)}"
        self.arrays[name] = np.asarray(array)
        return name

    def parameters(self, grid: Grid) -> list[str]:
        kind = np.uint8 if grid.unsigned else np.int8
        return [self.constant(np.float32(2.0**-grid.position)), self.constant(kind(grid.zero))]

    def node(self, op_type: str, inputs: list[str], output: str, name: str = "", **attrs: Any) -> str:
        self.nodes.append(helper.make_node(op_type, inputs, [output], name=name or output, **attrs))
        return output

    def _source(self, source: Source) -> None:
        floats = source.array.dtype.kind == "f"
        name = f"{source.name}_in" if floats else source.name
        kind = helper.np_dtype_to_tensor_dtype(source.array.dtype)
        self.inputs.append(helper.make_tensor_value_info(name, kind, source.array.shape))
        self.feeds[name] = source.array
        self.grids[source.name] = source.grid
        if floats:
            self.node("QuantizeLinear", [name, *self.parameters(source.grid)], source.name)

    def weight(self, constant: Constant, axis: int, dtype: Any = np.int8) -> str:
        name = f"w{len(self.arrays)}"
        position = np.array(constant.position)
        inputs = [
            self.constant(constant.integers.astype(dtype)),
            self.constant(np.float32(2.0) ** np.float32(-position)),
        ]
        attrs = {"axis": axis} if position.ndim else {}
        return self.node("DequantizeLinear", inputs, name, **attrs)

    def _step(self, step: Step) -> None:
        operands = [
            self.node("DequantizeLinear", [name, *self.parameters(self.grids[name])], f"{step.output}_{i}")
            for i, name in enumerate(step.inputs)
        ]
        if step.weight is not None:
            axis = {"Conv": 0, "ConvTranspose": 1}.get(step.op, 0 if step.attrs.get("transB") else 1)
            operands.append(self.weight(step.weight, axis))
        if step.bias is not None:
            operands.append(self.weight(step.bias, 0, np.int32 if isinstance(step.bias.position, tuple) else np.int8))
        attrs = dict(step.attrs)
        match step.op:
            case "Pad":
                operands.append(self.constant(np.array(attrs.pop("pads"), np.int64)))
            case "Slice":
                parts = attrs.pop("slices")
                ends = [[s, max(e, -(1 << 31)), i, d] for i, (s, e, d) in enumerate(parts)]
                operands += [self.constant(np.array(column, np.int64)) for column in zip(*ends, strict=True)]
            case "Reshape":
                operands.append(self.constant(np.array(attrs.pop("shape"), np.int64)))
            case "Resize":
                scales = np.array([1, 1, *map(float, attrs.pop("scales"))], np.float32)
                operands += ["", self.constant(scales)]
                attrs |= {"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}
            case "HardSigmoid":
                attrs |= {"alpha": 1 / 6, "beta": 0.5}
        label = f"{step.output}_op"
        y = self.node(step.op, operands, f"{step.output}_real", label, **attrs)
        if step.activation is not None:
            y = self._activated(y, step)
        self.node("QuantizeLinear", [y, *self.parameters(step.grid)], step.output)
        self.grids[step.output] = step.grid

    def _activated(self, y: str, step: Step) -> str:
        name, act, inputs, attrs = f"{step.output}_act", step.activation, [y], {}
        match act.kind:
            case "Clip":
                inputs += [self.constant(np.float32(end)) for end in (0, 6)]
            case "LeakyRelu":
                attrs = {"alpha": act.slope}
            case "PRelu":
                inputs.append(self.weight(act.slopes, 0))  # shaped as it broadcasts
        return self.node(act.kind, inputs, name, **attrs)


# ---------------------------------------------------------------------------------------------
# Programs
# ---------------------------------------------------------------------------------------------

_SHIFTS = (-3, -2, -1, -1, 0, 0, 0, 1, 1, 2, 3, 6, -9)  # of an output's position from where it just fits
_SLOPES = (26 / 256, 0.1, 0.01, 0.25, 0.3, 1.0)


class _Drawing:
    """Draws a program step by step, with each tensor's values at hand so that positions can suit them."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self.draw = draw
        self.rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        self.sources: list[Source] = []
        self.steps: list[Step] = []
        self.found: dict[str, Found] = {}

    def pick(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def count(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def codes(self, shape: Any, low: int, high: int) -> np.ndarray:
        middle = (low + high + 1) // 2
        ends = np.array([low, high, low, high, middle, middle - 1, middle + 1])
        match self.pick("any", "any", "ends", "small", "sparse"):
            case "any":
                return self.rng.integers(low, high + 1, shape)
            case "ends":
                return self.rng.choice(ends, shape)
            case "sparse":
                return np.where(self.rng.random(shape) < 0.1, self.rng.integers(low, high + 1, shape), middle)
        return middle + self.rng.integers(-9, 10, shape)

    def grid(self, position: int) -> Grid:
        unsigned, zero = self.pick(
            (False, 0), (False, 0), (True, 128), (True, 128), (True, 120), (False, -6), (True, 0)
        )
        return Grid(max(-24, min(position, 30)), unsigned, zero)

    def source(self, shape: tuple[int, ...]) -> str:
        grid, name = self.grid(self.count(-3, 10)), f"x{len(self.sources)}"
        low = 0 if grid.unsigned else -128
        array = self.codes(shape, low, low + 255)
        if self.pick(False, False, True):
            parts = array - grid.zero + self.rng.choice([0, 0.5, -0.5, 0.25, -40, 40.5], shape)
            array = (parts * 2.0**-grid.position).astype(np.float32)
        else:
            array = array.astype(np.uint8 if grid.unsigned else np.int8)
        self.sources.append(Source(name, array, grid))
        self.found |= evaluate(Program((self.sources[-1],), ()), CHIPS["aie2_x1"])
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        return self.found[name].integers.shape

    def other(self, like: str) -> str:
        """A tensor of the same shape: an earlier one, or one that comes in."""
        same = [n for n, found in self.found.items() if found.integers.shape == self.shape(like)]
        return self.pick(*same, "") or self.source(self.shape(like))

    def add(self, step: Step) -> str:
        step = dataclasses.replace(step, output=f"t{len(self.steps)}", activation=self.activation(step))
        operands = [self.found[name] for name in step.inputs]
        for chip in (CHIPS["aie2_x1"], CHIPS["ort"]):
            try:
                exact = computed(step, operands, chip)
                most = max(map(abs, exact.values.reshape(-1)), default=0)
                position = 6 - math.floor(math.log2(most)) if most else 3
                step = dataclasses.replace(step, grid=self.grid(position + self.pick(*_SHIFTS)))
                self.found[step.output] = quantized(exact, step.grid, chip, step.activation)
                break
            except NoForm:
                continue
        else:  # beyond 32 bits everywhere: what comes of it matters to none
            return step.inputs[0]
        self.steps.append(step)
        return step.output

    def activation(self, step: Step) -> Activation | None:
        kinds = [None, None]
        if step.op not in ("Sigmoid", "Tanh", "Exp", "HardSigmoid", "HardSwish"):
            kinds += ["Relu", "Clip"]
        if step.op in ("Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "Sum", "Sub", "Mul", "Identity"):
            kinds += ["LeakyRelu", "PRelu"]
        kind = self.pick(*kinds)
        if kind == "LeakyRelu":
            return Activation(kind, self.pick(*_SLOPES))
        if kind == "PRelu":
            return Activation(kind, slopes=Constant(np.array([self.count(1, 127)]), self.count(4, 8)))
        return kind and Activation(kind)

    def weight(self, shape: tuple[int, ...], channels: int | None = None) -> Constant:
        position: Any = self.count(-2, 10)
        if channels is not None and self.pick(False, False, False, True):
            position = tuple(int(p) for p in position + self.rng.integers(-2, 3, channels))
        return Constant(self.codes(shape, -128, 127), position)

    def bias(self, x: str, weight: Constant, channels: int) -> Constant | None:
        if self.pick(False, True, True) is False:
            return None
        if isinstance(weight.position, tuple):
            position = tuple(p + self.found[x].grid.position for p in weight.position)
            return Constant(self.rng.integers(-9999, 10000, channels), position)
        shift = self.pick(-9, -6, -2, -1, 0, 1, 2, 4, 7, 15)
        return Constant(self.codes(channels, -128, 127), self.found[x].grid.position + weight.position - shift)

    def products(self, op: str, x: str, shape: tuple[int, ...], outputs: int, **attrs: Any) -> str:
        weight = self.weight(shape, None if op in ("ConvTranspose", "MatMul") else outputs)
        bias = None if op == "MatMul" else self.bias(x, weight, outputs)
        return self.add(Step(op, (x,), "", Grid(0), attrs, weight, bias))

    # One step of a kind -------------------------------------------------------------------------

    def conv(self, x: str) -> str:
        _, channels, *spatial = self.shape(x)
        kernel = [self.pick(*(k for k in (1, 2, 3) if k <= n)) for n in spatial]
        dilations = [self.pick(1, 2) if (k - 1) * 2 + 1 <= n else 1 for k, n in zip(kernel, spatial, strict=True)]
        group = self.pick(*(g for g in {1, 2, channels} if channels % g == 0))
        outputs = group * self.count(1, 3)
        attrs = {
            "dilations": dilations,
            "strides": [self.pick(1, 1, 2) for _ in kernel],
            "pads": [self.pick(0, 0, 1) for _ in [*kernel, *kernel]],
            "group": group,
        }
        return self.products("Conv", x, (outputs, channels // group, *kernel), outputs, **attrs)

    def conv_transpose(self, x: str) -> str:
        grid = self.found[x].grid
        if grid.zero != (128 if grid.unsigned else 0):  # a device has no other, and jq no form for these
            return x
        _, channels, *spatial = self.shape(x)
        if math.prod(spatial) > 36:
            return x
        kernel = [self.count(1, 3) for _ in spatial]
        group = self.pick(*(g for g in {1, 2, channels} if channels % g == 0))
        strides = [self.count(1, 2) for _ in kernel]
        attrs = {
            "strides": strides,
            "dilations": [self.pick(1, 1, 2) for _ in kernel],
            "pads": [self.pick(0, 1) if k > 1 and n > 2 else 0 for k, n in zip(kernel, spatial, strict=True)] * 2,
            "output_padding": [self.count(0, s - 1) for s in strides],
            "group": group,
        }
        outputs = self.count(1, 2)
        return self.products("ConvTranspose", x, (channels, outputs, *kernel), outputs * group, **attrs)

    def gemm(self, x: str) -> str:
        depth, outputs, turned = self.shape(x)[1], self.count(1, 4), self.count(0, 1)
        shape = (outputs, depth) if turned else (depth, outputs)
        return self.products("Gemm", x, shape, outputs, transB=turned)

    def matmul(self, x: str) -> str:
        *batch, _, depth = self.shape(x)
        if self.pick(True, False):
            return self.products("MatMul", x, (depth, self.count(1, 4)), 0)
        other = self.source((*batch, depth, self.count(1, 3)))
        return self.add(Step("MatMul", (x, other), "", Grid(0)))

    def combined(self, x: str) -> str:
        op = self.pick("Add", "Add", "Sub", "Max", "Min", "Sum", "Mul")
        others = [self.other(x) for _ in range(self.count(1, 3) if op in ("Max", "Min", "Sum") else 1)]
        operands = (x, *others) if self.pick(True, False) else (*others, x)
        return self.add(Step(op, operands, "", Grid(0)))

    def concat(self, x: str) -> str:
        axis = self.count(1, len(self.shape(x)) - 1)
        if self.shape(x)[axis] > 6:
            return x
        return self.add(Step("Concat", (x, self.other(x)), "", Grid(0), {"axis": axis}))

    def pool(self, x: str) -> str:
        spatial = self.shape(x)[2:]
        op = self.pick("AveragePool", "AveragePool", "MaxPool")
        kernel = [self.count(1, min(n, 7)) for n in spatial]
        if min(spatial) >= 3 and self.pick(True, False):
            kernel = [self.pick(*(k for k in (3, 5, 6, 7) if k <= min(spatial)))] * 2
        attrs = {"kernel_shape": kernel, "strides": [self.pick(1, 2) for _ in kernel]}
        if min(kernel) > 1:
            attrs["pads"] = [self.pick(0, 0, 1) for _ in range(4)]
        if op == "AveragePool":
            attrs["count_include_pad"] = self.pick(1, 1, 0)
        return self.add(Step(op, (x,), "", Grid(0), attrs))

    def mean(self, x: str) -> str:
        rank = len(self.shape(x))
        if rank == 4 and self.pick(True, False):
            return self.add(Step("GlobalAveragePool", (x,), "", Grid(0)))
        axes = sorted(self.draw(st.sets(st.integers(1, rank - 1), min_size=1, max_size=2)))
        return self.add(Step("ReduceMean", (x,), "", Grid(0), {"axes": axes, "keepdims": 1}))

    def moved(self, x: str) -> str:
        shape, rank = self.shape(x), len(self.shape(x))
        match self.pick("Pad", "Slice", "Transpose", "Reshape", "Resize"):
            case "Pad":
                mode = self.pick("constant", "edge", "reflect")
                few = [self.count(0, 1) if n > 1 else 0 for n in shape]
                more = [self.count(0, 1) if n > 1 else 0 for n in shape]
                few[0] = more[0] = 0
                return self.add(Step("Pad", (x,), "", Grid(0), {"pads": [*few, *more], "mode": mode}))
            case "Slice":
                slices = [(0, n, 1) if n < 2 else self.pick((0, n, 1), (1, n, 1), (0, n, 2)) for n in shape]
                return self.add(Step("Slice", (x,), "", Grid(0), {"slices": slices}))
            case "Transpose":
                perm = [0, *self.draw(st.permutations(range(1, rank)))]
                return self.add(Step("Transpose", (x,), "", Grid(0), {"perm": perm}))
            case "Reshape":
                if rank == 2:
                    return x
                folded = (shape[0], shape[1], -1) if rank == 4 and self.pick(True, False) else (shape[0], -1)
                return self.add(Step("Reshape", (x,), "", Grid(0), {"shape": folded}))
        if rank != 4 or max(shape[2:]) > 6:
            return x
        scales = [
            self.pick(Fraction(1), Fraction(2), Fraction(1, 2) if n > 1 else Fraction(1), Fraction(3, 2))
            for n in shape[2:]
        ]
        return self.add(Step("Resize", (x,), "", Grid(0), {"scales": scales}))

    def function(self, x: str) -> str:
        op = self.pick("HardSigmoid", "HardSwish", "Sigmoid", "Tanh", "Exp", "Identity", "Identity", "Identity")
        return self.add(Step(op, (x,), "", Grid(0)))

    def kinds(self, x: str) -> list[Callable[[str], str]]:
        common = [self.combined, self.combined, self.function, self.moved, self.concat]
        return {
            2: [*common, self.gemm, self.matmul, self.mean],
            3: [*common, self.conv, self.conv, self.conv_transpose, self.matmul, self.mean],
            4: [
                *common,
                self.conv,
                self.conv,
                self.conv,
                self.conv_transpose,
                self.pool,
                self.pool,
                self.mean,
                self.matmul,
            ],
        }[len(self.shape(x))]


@st.composite
def programs(draw: Callable[[Any], Any], first: str = "") -> Program:
    """One to four steps from one tensor, others coming in."""
    drawing = _Drawing(draw)
    images = [(1, 2, 4, 4), (2, 3, 5, 3), (1, 4, 3, 3), (1, 1, 7, 7), (1, 8, 2, 2), (1, 3, 6, 6)]
    shapes = [*images, (2, 4, 5), (1, 3, 4), (2, 5), (3, 4)]
    x = drawing.source(draw(st.sampled_from(shapes)))
    for _ in range(draw(st.integers(1, 4))):
        x = draw(st.sampled_from(drawing.kinds(x)))(x)
    if not drawing.steps:
        drawing.add(Step("Identity", (x,), "", Grid(0)))
    return Program(tuple(drawing.sources), tuple(drawing.steps))


# ---------------------------------------------------------------------------------------------
# Properties
# ---------------------------------------------------------------------------------------------


def check(program: Program, target: str) -> None:
    model = _Model(program)
    chip = jq.integer.load(model.proto, target)
    computed = chip.reading.run(chip.params, {k: jnp.asarray(v) for k, v in model.feeds.items()})
    grids = {s.name: s.grid for s in program.sources} | {s.output: s.grid for s in program.steps}
    have = {name: np.asarray(x).astype(object) - grids[name].zero for name, x in computed.codes.items()}
    formed: set[str] = set()

    def settle(name: str, expected: Found) -> Any:
        formed.add(name)
        if name not in have:
            return expected.integers
        off = np.abs(have[name] - expected.integers)
        wrong = np.argwhere((off > 1) | (expected.sure & (off > 0)))
        assert not len(wrong), (
            f"{target}: {name} at {wrong[0].tolist()}, {len(wrong)} of {off.size}: expected "
            f"{expected.integers[tuple(wrong[0])]}, found {have[name][tuple(wrong[0])]}; floats: {computed.floats}"
        )
        return np.where(expected.sure, expected.integers, have[name])

    with contextlib.suppress(NoForm):
        evaluate(program, CHIPS[target], settle)
    beyond = {label: why for label, why in computed.floats.items() if label.split("_")[0] in formed}
    assert not beyond, f"{target}: computed in float32: {beyond}"
    last = program.steps[-1]
    if last.output in have:
        assert (np.asarray(computed.outputs[last.output]).astype(object) - last.grid.zero == have[last.output]).all()


@pytest.mark.parametrize("target", CHIPS)
@given(program=programs())
@EVERY
def test_every_tensor_equals_exact_arithmetic(target, program):
    note(str(program.steps))
    check(program, target)


# ---------------------------------------------------------------------------------------------
# Where drawing seldom goes
# ---------------------------------------------------------------------------------------------

ALL = np.arange(-128, 128, dtype=np.int8).reshape(1, 4, 8, 8)
CHIPS_ALONE = [name for name in CHIPS if name != "ort"]


def of_all(op: str, position: int, grid: Grid, **parts: Any) -> Program:
    """One step of every int8."""
    return Program((Source("x0", ALL, Grid(position)),), (Step(op, ("x0",), "t0", grid, **parts),))


@pytest.mark.parametrize("target", CHIPS)
@pytest.mark.parametrize("op", ["HardSigmoid", "HardSwish", "Sigmoid", "Tanh", "Exp"])
@pytest.mark.parametrize(("position", "out"), [(0, 0), (3, 7), (5, 4), (7, 7), (12, 8)])
def test_functions_of_every_code(target, op, position, out):
    check(of_all(op, position, Grid(out)), target)


@pytest.mark.parametrize("target", CHIPS)
@pytest.mark.parametrize("position", [2, 3, 4, 5, 6])
def test_six_is_a_constant_of_the_chip(target, position):
    check(of_all("Identity", position, Grid(position + 1), activation=Activation("Clip")), target)


@pytest.mark.parametrize(("target", "slope"), [("ort", 0.0), ("aie2_x1", 0.0), ("aie2_x1", 0.001), ("aie2_even", 0.0)])
def test_a_slope_of_nothing(target, slope):
    check(of_all("Conv", 4, Grid(4), weight=EYE, activation=Activation("LeakyRelu", slope)), target)


def slopes(*integers: int) -> Activation:
    return Activation("PRelu", slopes=Constant(np.array(integers).reshape(-1, 1, 1), 8))


EYE = Constant(np.eye(4, dtype=int).reshape(4, 4, 1, 1) * 64, 6)


@pytest.mark.parametrize("target", CHIPS)
@pytest.mark.parametrize("integers", [(32, 64, 1, 16)])
def test_slopes_per_channel_that_are_powers_of_two(target, integers):
    check(of_all("Conv", 4, Grid(5), weight=EYE, activation=slopes(*integers)), target)


@pytest.mark.parametrize("target", CHIPS)
def test_one_of_the_slopes_is_nothing(target):
    check(of_all("Conv", 4, Grid(5), weight=EYE, activation=slopes(0, 26, 77, 3)), target)


@pytest.mark.parametrize("target", CHIPS_ALONE)
def test_slopes_per_channel(target):
    check(of_all("Conv", 4, Grid(5), weight=EYE, activation=slopes(26, 77, 3, 125)), target)


@pytest.mark.parametrize("target", ["aie2_x1", "aie2_even"])
@pytest.mark.parametrize("cut", [3, 1, 0, -2])
@pytest.mark.parametrize("bits", [15, 17, 20])
def test_a_bias_too_fine_for_an_accumulator(target, cut, bits):
    x = np.zeros_like(ALL)
    x[0, 0] = np.arange(-32, 32).reshape(8, 8)
    weight = Constant(np.tile(np.array([1, 127, 127, 127]).reshape(1, 4, 1, 1), (4, 1, 1, 1)), 4)
    bias = Constant(np.array([5, -7, 127, -128]), 8 + bits)
    step = Step("Conv", ("x0",), "t0", Grid(8 - cut), weight=weight, bias=bias)
    check(Program((Source("x0", x, Grid(4)),), (step,)), target)
