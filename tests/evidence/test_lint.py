"""`lint`: for each rule a small model that fires it and a near miss that does not; then real networks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

import jq.zoo
from jq.config import QuantConfig, presets
from jq.errors import ConfigError, ModelError
from jq.evidence.lint import RULES, lint
from jq.evidence.lint_rules import Finding
from jq.graph.domains import CONTRIB, QUARK, VITIS
from jq.graph.read import load
from jq.npu.facts import NPU_FORMATS, pool_factor, pool_multiplier
from tests.conftest import one_node
from tests.passes.models import batchnorm, build, node, normal, statistics

XINT8 = presets["XINT8"]


def rules(model: Any, config: QuantConfig | str = "XINT8") -> list[str]:
    return [f.rule for f in lint(model, config)]


def only(model: Any, rule: str, config: QuantConfig | str = "XINT8") -> Finding:
    """The one finding of a rule."""
    found = [f for f in lint(model, config) if f.rule == rule]
    assert len(found) == 1, found
    return found[0]


def convs(
    *middle: onnx.NodeProto, arrays: Mapping[str, np.ndarray] = {}, w: np.ndarray | None = None, **options: Any
) -> onnx.ModelProto:
    """Two convolutions, `a` made by the first; nodes from `a` to `b`, if any; nothing to find but what they bring."""
    weights = {"w1": normal(4, 4, 1, 1) if w is None else w, "w2": normal(4, 4, 1, 1, seed=1)}
    last = [node("Conv", ["b" if middle else "a", "w2"], ["y"], name="second")]
    first = [node("Conv", ["x", "w1"], ["a"], name="first")]
    return build([*first, *middle, *last], {**weights, **arrays}, **options)


def test_nothing_to_say_of_a_plain_model() -> None:
    assert lint(convs()) == []
    assert lint(convs(), "A8W8") == lint(convs(), QuantConfig()) == lint(load(convs())) == []


def test_sources_and_refusals(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(convs(opset=13), path)
    assert rules(path) == rules(str(path)) == rules(path.read_bytes()) == ["opset"]
    with pytest.raises(ModelError):
        lint(b"nonsense")
    with pytest.raises(ConfigError, match="XINT8"):
        lint(path, "XINT9")


def test_str_and_order() -> None:
    assert str(Finding("a-rule", "note", "conv1", "text")) == "note: conv1: text [a-rule]"
    found = lint(convs(node("Sigmoid", ["a"], ["b"]), opset=13, w=np.full((4, 4, 1, 1), np.nan, np.float32)))
    assert [f.severity for f in found] == ["error", "warning", "note"]


# operators that are not listed


def test_unlisted_operators_are_counted_by_type() -> None:
    model = convs(
        node("Exp", ["a"], ["e"], name="exp1"), node("Exp", ["e"], ["f"], name="exp2"), node("Abs", ["f"], ["b"])
    )
    found = only(model, "op-not-on-npu")
    assert found.where == "exp1" and found.severity == "warning"
    assert "2 Exp nodes" in found.message and "listed for A16W8, BF16" in found.message
    assert len([f for f in lint(model, "A8W8") if f.rule == "op-not-on-npu"]) == 2  # Exp and Abs


@pytest.mark.parametrize(
    ("op", "severities"),
    [
        ("Sigmoid", {"XINT8": "warning"}),
        ("HardSwish", {}),
        ("Tanh", {"A8W8": "warning"}),
        ("Softplus", {"XINT8": "warning", "A8W8": "warning"}),
        ("Relu", {}),
    ],
)
def test_formats_differ(op: str, severities: Mapping[str, str]) -> None:
    model = convs(node(op, ["a"], ["b"]))
    for config in ("XINT8", "A8W8"):
        found = [f.severity for f in lint(model, config) if f.rule == "op-not-on-npu"]
        assert found == [s for c, s in severities.items() if c == config]


def test_split_becomes_slices() -> None:
    split = node("Split", ["a"], ["p", "q"], axis=1)
    model = convs(split, node("Concat", ["q", "p"], ["b"], axis=1))
    for config in ("XINT8", "A8W8", "VINT8"):
        found = only(model, "op-not-on-npu", config)
        assert "into Slices" in found.message and found.severity == "note"
    assert "into Slices" in only(model, "op-not-on-npu", XINT8.replace(op_types=("Conv",))).message
    for config in (XINT8.replace(rewrites=()), XINT8.replace(exclude=("Split",))):
        found = only(model, "op-not-on-npu", config)
        assert "the CPU" in found.message and found.severity == "warning"


def test_sigmoid_that_gates_its_input() -> None:
    silu = (node("Sigmoid", ["a"], ["s"]), node("Mul", ["a", "s"], ["b"]))
    assert "1 of them gate" in only(convs(*silu), "op-not-on-npu").message
    plain = convs(node("Sigmoid", ["a"], ["b"]))
    assert "gate" not in only(plain, "op-not-on-npu").message
    for config in ("VINT8", XINT8.replace(exclude=("Sigmoid",)), XINT8.replace(forms=())):
        assert "listed for A8W8, A16W8, BF16" in only(plain, "op-not-on-npu", config).message


def test_a_type_of_which_some_are_excluded_is_two_findings() -> None:
    nodes = (node("Sigmoid", ["a"], ["s"], name="in"), node("Sigmoid", ["s"], ["b"], name="out"))
    config = XINT8.replace(exclude=("out",))
    found = {f.where: f.message for f in lint(convs(*nodes), config) if f.rule == "op-not-on-npu"}
    assert "HardSigmoid" in found["in"] and "the CPU" in found["out"]


def test_shape_arithmetic_is_no_operator_of_the_npu() -> None:
    nodes = [
        node("Shape", ["a"], ["s"]),
        node("Gather", ["s", "zero"], ["n"]),
        node("Unsqueeze", ["n", "axes"], ["u"]),
        node("Concat", ["u", "rest"], ["t"], axis=0),
        node("Reshape", ["a", "t"], ["b"]),
    ]
    arrays = {"zero": np.array(0), "axes": np.array([0]), "rest": np.array([4, 6, 5])}
    assert rules(convs(*nodes, arrays=arrays, x=("N", 4, 5, 6))) == ["dynamic-batch"]


def test_a_folded_batchnorm_is_no_finding() -> None:
    model = convs(batchnorm("a", "b", "bn"), arrays=statistics("bn", 4))
    assert [r for r in rules(model) if r != "channel-range"] == []


def test_tables() -> None:
    listed = {f: {op for op, formats in NPU_FORMATS.items() if f in formats} for f in ("XINT8", "A8W8", "A16W8")}
    assert not listed["XINT8"] & {"ConvTranspose", "HardSigmoid", "Sigmoid", "Exp", "Split", "Gather", "QuantizeLinear"}
    assert listed["A8W8"] >= {"Sigmoid", "HardSigmoid", "ConvTranspose"}
    assert not listed["A16W8"] & {"Resize", "ReduceMean", "HardSwish"}
    for op in NPU_FORMATS.keys() - {"GroupConv"}:
        assert onnx.defs.has(op), op
    assert len({(r.name, r.check) for r in RULES}) == len(RULES)  # several ways to one abort share its name


# shapes, opsets, structure


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        ((2, 4, 5, 6), []),
        (("N", 4, 5, 6), ["dynamic-batch"]),
        ((None, 4, 5, 6), ["dynamic-batch"]),
        (("N", 4, "H", "W"), ["dynamic-shape"]),
        ((2, 4, 5, None), ["dynamic-shape"]),
        (None, ["dynamic-shape"]),
    ],
)
def test_dynamic_shapes(x: Sequence[int | str | None] | None, expected: list[str]) -> None:
    found = lint(convs(x=x))  # type: ignore[arg-type]
    assert [f.rule for f in found] == expected
    assert [f.severity for f in found] == ["note" if r == "dynamic-batch" else "warning" for r in expected]


@pytest.mark.parametrize(
    ("opset", "config", "text"),
    [
        (6, "XINT8", "below 7"),
        (9, "XINT8", "gets 17"),
        (12, "XINT8", "17 to 21"),
        (17, presets["A8W8"].replace(activation=jq.arithmetic.formats.INT16), "need 21"),
        (17, "XINT8", None),
        (21, "XINT8", None),
        (22, "XINT8", "17 to 21"),
    ],
)
def test_opset(opset: int, config: QuantConfig | str, text: str | None) -> None:
    model = convs()
    model.opset_import[0].version = opset
    if text is None:
        assert rules(model, config) == []
    else:
        assert text in only(model, "opset", config).message
        assert only(model, "opset", config).severity == ("warning" if opset in (6, 22) else "note")


def test_few_convs() -> None:
    one = build([node("Conv", ["x", "w"], ["y"])], {"w": normal(4, 4, 1, 1)})
    assert only(one, "few-convs").message.startswith("1 Conv")
    matmul = build([node("MatMul", ["x", "w"], ["y"])], {"w": normal(6, 6)})
    assert "few-convs" in rules(matmul) and "few-convs" not in rules(convs())


def test_nothing_to_quantize() -> None:
    assert rules(one_node("Abs", {"x": normal(2)}, opset=17)) == [
        "no-linear-op",
        "provider-small",
    ]  # not few-convs as well


def test_already_quantized() -> None:
    arrays = {"s": np.float32(0.5), "z": np.uint8(128)}
    pair = [node("QuantizeLinear", ["a", "s", "z"], ["q"]), node("DequantizeLinear", ["q", "s", "z"], ["b"])]
    found = only(convs(*pair, arrays=arrays), "already-quantized")
    assert found.severity == "error" and "2 nodes" in found.message
    integer = one_node(
        "ConvInteger", {"x": np.zeros((1, 1, 3, 3), np.uint8)}, initializers={"w": np.zeros((1, 1, 1, 1), np.uint8)}
    )
    assert "already-quantized" in rules(integer)


@pytest.mark.parametrize(
    ("op", "domain"),
    [("VitisQuantizeLinear", VITIS), ("BFPFixNeuron", VITIS), ("FixNeuron", CONTRIB), ("MXQuantizeDequantize", QUARK)],
)
def test_already_quantized_by_the_vendors_tools(op: str, domain: str) -> None:
    assert "already-quantized" in rules(one_node(op, {"x": normal(2, 4)}, domain=domain))


def test_subgraphs() -> None:
    def branch(op: str) -> onnx.GraphProto:
        return helper.make_graph([helper.make_node(op, ["a"], ["z"])], op, [], [onnx.ValueInfoProto(name="z")])

    choice = node("If", ["c"], ["b"], name="choice", then_branch=branch("Abs"), else_branch=branch("Neg"))
    switch = helper.make_tensor_value_info("c", TensorProto.BOOL, ())
    found = only(convs(choice, extra_inputs=[switch]), "subgraph")
    assert found.where == "choice" and "2 nodes" in found.message and found.severity == "warning"
    decided = convs(choice, arrays={"c": np.array(True)})  # prepare takes the branch
    assert "subgraph" not in rules(decided)


def test_unsupported_by_jq() -> None:
    found = only(one_node("Magic", {"x": normal(1)}, domain="com.acme"), "unsupported-op")
    assert found.severity == "error" and "com.acme::Magic" in found.message


# arithmetic of the NPU


@pytest.mark.parametrize(
    ("alpha", "held", "severity"),
    [(0.1, "26/256", "note"), (0.01, "3/256", "warning"), (None, "3/256", "warning"), (26 / 256, None, None)],
)
def test_leaky_slope(alpha: float | None, held: str | None, severity: str | None) -> None:
    model = convs(node("LeakyRelu", ["a"], ["b"], **({} if alpha is None else {"alpha": alpha})))
    if held is None:
        assert rules(model) == []
    else:
        found = only(model, "leaky-slope")
        assert held in found.message and found.severity == severity
    assert rules(model, "A8W8") == rules(model, XINT8.replace(exclude=("LeakyRelu",))) == []


def test_hard_sigmoid() -> None:
    assert "0.2" in only(convs(node("HardSigmoid", ["a"], ["b"])), "hard-sigmoid").message  # ONNX's default
    for alpha in (1 / 6, 0.166667, 0.16667):
        model = convs(node("HardSigmoid", ["a"], ["b"], alpha=alpha, beta=0.5))
        assert only(model, "op-not-on-npu").severity == "note" and "hard-sigmoid" not in rules(model)


@pytest.mark.parametrize(("low", "high", "fires"), [(0, 6, False), (0, 1, False), (-1, 1, True), (0, 20, True)])
def test_clip_range(low: float, high: float, fires: bool) -> None:
    arrays = {"low": np.float32(low), "high": np.float32(high)}
    clip = node("Clip", ["a", "low", "high"], ["b"])
    assert rules(convs(clip, arrays=arrays)) == ["clip-range"] * fires
    assert rules(convs(clip, arrays=arrays), "VINT8") == []  # which computes no activation with another operator
    attributes = convs(node("Clip", ["a"], ["b"], min=float(low), max=float(high)), opset=10)
    assert "clip-range" in rules(attributes)  # which the vendor's tool does not look at
    between = convs(node("Abs", ["a"], ["c"]), node("Clip", ["c", "low", "high"], ["b"]), arrays=arrays)
    assert rules(between) == []


def pool(side: int | tuple[int, ...], op: str = "AveragePool", size: int = 64, **attrs: Any) -> onnx.ModelProto:
    kernel = side if isinstance(side, tuple) else (side, side)
    if op == "AveragePool":
        attrs |= {"kernel_shape": kernel}
    image = (size, size) if op == "AveragePool" else kernel
    return convs(node(op, ["a"], ["b"], name="pool", **attrs), x=(1, 4, *image))


# the table of the NPU's specification
@pytest.mark.parametrize(
    ("side", "percent"),
    [
        *((3, -1.56), (5, -2.34), (6, -1.56), (7, 0.49), (9, -0.13), (10, 0.10), (11, 0.44), (12, 0.20), (13, 0.05)),
        *((15, 0.25), (14, 0.49), (28, 0.49), (56, 0.49), (1, 0), (2, 0), (4, 0), (8, 0), (16, 0), (32, 0)),
    ],
)
def test_pool_factor(side: int, percent: float) -> None:
    assert round(100 * (pool_factor(side, side) - 1), 2) == pytest.approx(percent)
    if side * side > 512:
        return
    for op in ("AveragePool", "GlobalAveragePool"):
        model = pool(side, op)
        if percent == 0:
            assert rules(model) == []
        else:
            found = only(model, "pool-factor")
            assert f"{percent:+.2f}%" in found.message and found.severity == ("warning" if percent < -1 else "note")
        assert rules(model, "A8W8") == []


def test_pool_factor_of_rectangles_and_axes() -> None:
    assert "not simulate" in only(pool((2, 3)), "pool-factor").message
    mean = convs(node("ReduceMean", ["a"], ["b"], axes=[2, -1]), x=(1, 4, 7, 7))
    assert "73/512 * 73/512" in only(mean, "pool-factor").message


@given(st.lists(st.integers(1, 60), min_size=1, max_size=2))
def test_pool_factor_is_near(window: list[int]) -> None:
    multiplier, shift = pool_multiplier(window)
    assert abs(multiplier / 2**shift * math.prod(window) - 1) < 0.03


def test_pool_size() -> None:
    assert only(pool(28, "GlobalAveragePool"), "pool-size").severity == "note"
    assert only(pool(28, "GlobalAveragePool"), "pool-size", "VINT8").severity == "warning"  # and is not split
    assert only(pool((29, 31), "GlobalAveragePool"), "pool-size").severity == "warning"  # prime numbers
    assert only(pool(28), "pool-size").severity == "warning"
    assert only(pool((1, 257), size=300), "pool-size").severity == "warning"
    assert rules(pool((16, 32))) == []  # 512 elements


@pytest.mark.parametrize(
    ("attrs", "size", "fires"),
    [
        ({"pads": (1, 1, 1, 1)}, 8, True),
        ({"pads": (1, 1, 1, 1), "count_include_pad": 1}, 8, False),
        ({"pads": (0, 0, 0, 0)}, 8, False),
        ({}, 8, False),
        ({"auto_pad": "SAME_UPPER"}, 8, True),
        ({"auto_pad": "SAME_UPPER", "strides": (4, 4)}, 8, False),
        ({"auto_pad": "VALID"}, 8, False),
        ({"ceil_mode": 1, "strides": (4, 4)}, 10, True),
        ({"ceil_mode": 1, "strides": (4, 4)}, 8, False),
    ],
)
def test_padded_average_pool(attrs: Mapping[str, Any], size: int, fires: bool) -> None:
    model = pool(4, size=size, **attrs)
    # The second convolution takes any size: 1x1.
    assert rules(model) == ["padded-average-pool"] * fires
    assert rules(model, "A8W8") == []


# weights


def spread(factors: Sequence[float], shape: tuple[int, ...], axis: int) -> np.ndarray:
    """Weights whose largest magnitude along an axis is the factors."""
    weight = np.sign(normal(*shape))
    return (weight * np.expand_dims(factors, [a for a in range(len(shape)) if a != axis % len(shape)])).astype("f4")


WILD, TAME = [1, 0.005, 0.015, 1], [1, 0.5, 0.05, 1]
PER_CHANNEL = presets["A8W8"].replace(per_channel=True)


@pytest.mark.parametrize(
    ("op", "attrs", "shape", "axis"),
    [
        ("Conv", {}, (4, 4, 1, 1), 0),
        ("ConvTranspose", {}, (4, 4, 1, 1), 1),
        ("Gemm", {}, (6, 4), 1),
        ("Gemm", {"transB": 1}, (4, 6), 0),
        ("MatMul", {}, (6, 4), 1),
    ],
)
def test_channel_range(op: str, attrs: Mapping[str, Any], shape: tuple[int, ...], axis: int) -> None:
    x = (2, 6) if op == "Gemm" else (2, 4, 5, 6)
    for factors, fires in ((WILD, True), (TAME, False)):
        weight = spread(factors, shape, axis)
        model = build([node(op, ["x", "w"], ["y"], name="linear", **attrs)], {"w": weight}, x=x)
        found = [f for f in lint(model) if f.rule == "channel-range"]
        assert len(found) == fires
        if fires:
            assert "w: 2 of 4" in found[0].message and "CLE" in found[0].message
            assert "200 times the smallest" in found[0].message
            assert "per_channel" in only(model, "channel-range", "A8W8").message
        assert "channel-range" not in rules(model, PER_CHANNEL)


def test_channels_of_a_grouped_transposed_convolution() -> None:
    weight = np.ones((4, 2, 1, 1), np.float32)  # two groups of two inputs and two outputs
    weight[2:, 1] = 0
    model = build([node("ConvTranspose", ["x", "w"], ["y"], group=2)], {"w": weight})
    assert "1 of 4" in only(model, "dead-channel").message


def test_channels_that_training_let_decay_are_no_alarm() -> None:
    factors = [1.0] * 60 + [1e-3] * 10  # beside the others nothing, as in ResNet-50
    weight = spread(factors, (70, 4, 1, 1), 0)
    assert "channel-range" not in rules(build([node("Conv", ["x", "w"], ["y"])], {"w": weight}))
    outlier = spread([1.0] + [1e-3] * 69, (70, 4, 1, 1), 0)  # whereas here one channel takes all codes
    assert (
        "69 of 70, 69 of them all zero"
        in only(build([node("Conv", ["x", "w"], ["y"])], {"w": outlier}), "channel-range").message
    )


def test_dead_channels() -> None:
    found = only(convs(w=spread([1, 0, 1, 1], (4, 4, 1, 1), 0)), "dead-channel")
    assert found.severity == "note" and "w1: 1 of 4" in found.message
    assert "dead-channel" not in rules(convs(w=spread([1, 1e-3, 1, 1], (4, 4, 1, 1), 0)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite(value: float) -> None:
    weight = normal(4, 4, 1, 1)
    weight[0, 0] = value
    found = only(convs(w=weight), "non-finite")
    assert found.severity == "error" and "w1: 1" in found.message


def test_open_clip_is_finite() -> None:
    arrays = {"low": np.float32(0.5), "high": np.float32(np.inf)}
    assert rules(convs(node("Clip", ["a", "low", "high"], ["b"]), arrays=arrays)) == ["clip-range"]


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_float_types(dtype: str) -> None:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    weights = {k: normal(4, 4, 1, 1, seed=i).astype(dtype) for i, k in enumerate(("w1", "w2"))}
    nodes = [node("Conv", ["x", "w1"], ["a"]), node("Conv", ["a", "w2"], ["y"])]
    model = build(nodes, weights, dtype=kind)
    found = only(model, "float-type")
    assert "w1, w2, x" in found.message and found.severity == "error"
    with pytest.raises(ModelError, match=dtype):  # as it says
        jq.quantize(model, {"x": normal(2, 4, 5, 6).astype(dtype)})
    config = XINT8.replace(exclude=("Conv",))  # nothing is quantized, and nothing refused
    assert only(model, "float-type", config).severity == "warning"
    with pytest.warns(UserWarning, match="nothing is quantized"):
        jq.quantize(model, {"x": normal(2, 4, 5, 6).astype(dtype)}, config)


@pytest.mark.parametrize(
    ("op", "constant", "after", "fires"),
    [
        ("Add", 1e-5, "Sqrt", "so small"),
        ("Max", 1e-5, "Log", "so small"),
        ("Add", 1e-5, "Relu", None),  # an offset that happens to be small
        ("Add", 0.5, "Sqrt", None),
        ("Add", -1e9, "Relu", "so large"),
        ("Max", -1e9, "Relu", "so large"),
        ("Mul", 1e-5, "Relu", None),  # only moves the scale
        ("Mul", [1e3, 0.1, 0.2, 0.3, 1, 900], "Relu", "4 of 6, the largest 1e+03"),
        ("Mul", [8, 16, 32, 0.1, 8, 8], "Relu", None),
        ("Div", 255, "Relu", None),
        ("Pow", 1e-5, "Relu", None),
    ],
)
def test_constants(op: str, constant: Any, after: str, fires: str | None) -> None:
    # Relu keeps the constant from being fused into the convolution.
    nodes = [node("Relu", ["a"], ["r"]), node(op, ["r", "c"], ["t"], name="it"), node(after, ["t"], ["b"])]
    found = [f for f in lint(convs(*nodes, arrays={"c": np.array(constant, "f4")})) if f.rule == "constant-range"]
    assert len(found) == bool(fires)
    assert not fires or (fires in found[0].message and "c of it" in found[0].message and found[0].where == "it")


def test_formats_without_integers() -> None:
    model = convs(node("Sigmoid", ["a"], ["b"]), w=spread(WILD, (4, 4, 1, 1), 0))
    assert rules(model, "BF16") == []


# readable, quick, robust


def test_repeats_are_one_finding() -> None:
    chain = ["a", *(f"e{i}" for i in range(11)), "b"]
    arrays = {f"c{i}": np.float32(1e9 + i * 1e6) for i in range(12)}
    adds = [node("Max", [s, f"c{i}"], [t]) for i, (s, t) in enumerate(itertools.pairwise(chain))]
    message = only(convs(*adds, arrays=arrays), "constant-range").message
    assert (
        "12 constant operands" in message
        and "and 7 more" in message
        and message.count(": 1e+09") + message.count(": 1.0") == 5
    )


@pytest.mark.parametrize("name", jq.zoo.models())
def test_bundled(name: str) -> None:
    found = lint(jq.zoo.path(name))
    assert {f.rule for f in found} <= {"dynamic-batch", "pool-factor", "channel-range"}
    assert ("channel-range" in [f.rule for f in found]) == (name == "fashion_mobilenet")  # depthwise layers
    assert all(f.severity != "error" for f in found) and len(found) < 6


@pytest.mark.parametrize("name", jq.zoo.models())
@pytest.mark.parametrize("config", ["XINT8", "A8W8"])
def test_real_networks_read_well(name: str, config: str) -> None:
    found = lint(jq.zoo.path(name), config)
    assert len(found) < 12 and all(len(f.message) < 1200 for f in found)
    assert all(f.severity != "error" for f in found)


@pytest.mark.parametrize(
    "model",
    [
        build([node("Conv", ["x", "w"], ["y"])], {"w": np.zeros((0, 4, 1, 1), np.float32)}),
        build([node("MatMul", ["x", "w"], ["y"])], {"w": np.zeros((6, 0), np.float32)}),
        build([node("MatMul", ["x", "w"], ["y"])], {"w": normal(6)}),
        build([node("Add", ["x", "c"], ["y"])], {"c": np.zeros((0,), np.float32)}, x=(2, 4, 5, 1)),
        build([node("Conv", ["x", "w"], ["y"])], {"w": np.zeros((4, 4, 1, 1), np.float32)}),
        build([node("GlobalAveragePool", ["x"], ["y"])], x=("N", 4, None, "W")),
        build([node("GlobalAveragePool", ["x"], ["y"])], x=(1, 4, 0, 3)),
        build([node("AveragePool", ["x"], ["y"], kernel_shape=[3, 3], auto_pad="SAME_LOWER")], x=("N", 4, None, None)),
        build([node("AveragePool", ["x"], ["y"])]),
        build([node("ReduceMean", ["x"], ["y"])]),
        build([node("LeakyRelu", ["x"], ["y"], alpha=0.0)]),
        build([node("LeakyRelu", ["x"], ["y"], alpha=math.nan)]),
        build([node("Identity", ["x"], ["y"])]),
        one_node("Clip", {"x": normal(2), "low": normal(), "high": normal()}),
        one_node("Clip", {"x": normal(2)}),
        one_node("Conv", {"x": normal(1, 4, 3, 3), "w": normal(4, 4, 1, 1)}),
    ],
)
def test_odd_models(model: onnx.ModelProto) -> None:
    for config in ("XINT8", "A8W8", PER_CHANNEL):
        assert all(f.message and f.where and f.rule for f in lint(model, config))
