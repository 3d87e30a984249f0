"""Which tensors are quantized, operator by operator: the expected ones are those of Quark 0.13, run on these models."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import jq
from jq.arithmetic.formats import BFLOAT16, INT4, INT8, INT16, INT32, UINT8
from jq.config import presets
from jq.graph import Graph, Node
from jq.plan.placement import Placement, absorbed, place, rule_of, shared
from jq.plan.planning import make_plan
from tests.conftest import onnxruntime_outputs
from tests.passes.models import build, node, normal

XINT8 = presets["XINT8"]


def floats(graph: Graph) -> frozenset[str]:
    """All activations that could be quantized."""
    found = {k for k, v in graph.values.items() if v.dtype == np.float32 and not v.containers}
    return frozenset(found - graph.params.keys())


def placed(model: onnx.ModelProto, config: jq.QuantConfig = XINT8) -> tuple[Graph, Placement]:
    graph = jq.prepare(jq.load(model), config)
    return graph, place(graph, config, floats(graph))


def names(found: Collection[str]) -> str:
    return " ".join(sorted(found))


def image(name: str, *shape: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape or (2, 4, 5, 6))


def conv(output: str, bias: str = "") -> onnx.NodeProto:
    return node("Conv", ["x", "w", bias] if bias else ["x", "w"], [output], name="conv")


def clip(low: float, high: float) -> dict[str, np.ndarray]:
    return {**W, "low": np.float32(low), "high": np.float32(high)}


def reads(op: str, *more: str, **attrs: Any) -> onnx.NodeProto:
    """A node from `a` to the output."""
    return node(op, ["a", *more], ["y"], name="last", **attrs)


W = {"w": normal(4, 4, 1, 1)}
BIASED = {**W, "b": normal(4, seed=1)}
RELU, CLIP = reads("Relu"), reads("Clip", "low", "high")
TWO = {"extra_inputs": [image("x2")]}
PADS = {"p": np.array([0, 0, 1, 1, 0, 0, 1, 1])}
POOL = {"kernel_shape": [2, 2]}
SECOND = {"w2": normal(4, 4, 1, 1, seed=3), "b2": normal(4, seed=9)}
C = {"c": normal(4, 1, 1) + 3}

# name: activations, weights, nodes, arrays, other arguments of `build`
CASES: dict[str, tuple[str, str, Sequence[onnx.NodeProto], Mapping[str, np.ndarray], Mapping[str, Any]]] = {
    # an activation that alone reads the output of a linear operator, or of one like it
    "conv": ("x y", "b w", [conv("y", "b")], BIASED, {}),
    "conv_relu": ("x y", "w", [conv("a"), RELU], W, {}),
    "conv_clip6": ("x y", "w", [conv("a"), CLIP], clip(0, 6), {}),
    "conv_clip1": ("x y", "w", [conv("a"), CLIP], clip(0, 1), {}),
    "conv_clip3": ("a x y", "w", [conv("a"), CLIP], clip(0, 3), {}),
    "conv_leaky": ("x y", "w", [conv("a"), reads("LeakyRelu", alpha=0.1)], W, {}),
    "conv_prelu": ("x y", "s w", [conv("a"), reads("PRelu", "s")], {**W, "s": np.full((4, 1, 1), 0.1, "f4")}, {}),
    "conv_sigmoid": ("a x y", "w", [conv("a"), reads("Sigmoid")], W, {}),
    "conv_tanh": ("a x y", "w", [conv("a"), reads("Tanh")], W, {}),
    "conv_relu_twice": ("a r x y", "w", [conv("a"), node("Relu", ["a"], ["r"]), reads("Add", "r")], W, {}),
    "conv_relu_both_out": ("a x y", "w", [conv("a"), RELU], W, {"outputs": ("y", "a")}),
    "conv_out_and_read": ("a x y", "w w2", [conv("a"), reads("Conv", "w2")], W | SECOND, {"outputs": ("y", "a")}),
    "convs": ("r x y", "b b2 w w2", [conv("a", "b"), node("Relu", ["a"], ["r"]), node("Conv", ["r", "w2", "b2"], ["y"])],
              BIASED | SECOND, {}),
    "conv_transpose_relu": ("x y", "w", [node("ConvTranspose", ["x", "w"], ["a"]), RELU], W, {}),
    "add_relu": ("x x2 y", "", [node("Add", ["x", "x2"], ["a"]), RELU], {}, TWO),
    "add_itself_relu": ("x y", "", [node("Add", ["x", "x"], ["a"]), RELU], {}, {}),
    "mul_relu": ("a x x2 y", "", [node("Mul", ["x", "x2"], ["a"]), RELU], {}, TWO),
    "sub_relu": ("a x x2 y", "", [node("Sub", ["x", "x2"], ["a"]), RELU], {}, TWO),
    "concat_relu": ("a x x2 y", "", [node("Concat", ["x", "x2"], ["a"], axis=1), RELU], {}, TWO),
    "max_pool_relu": ("c x y", "w", [conv("c"), node("MaxPool", ["c"], ["a"], **POOL), RELU], W, {}),
    "average_pool_relu": ("c x y", "w", [conv("c"), node("AveragePool", ["c"], ["a"], **POOL), RELU], W, {}),
    "global_pool_relu": ("c x y", "w", [conv("c"), node("GlobalAveragePool", ["c"], ["a"]), RELU], W, {}),
    "matmul_relu": ("x y", "m", [node("MatMul", ["x", "m"], ["a"]), RELU], {"m": normal(6, 3)}, {}),
    "gemm_relu": ("x y", "b g", [node("Gemm", ["x", "g", "b"], ["a"]), RELU], {"g": normal(6, 3), "b": normal(3)},
                  {"x": (2, 6)}),
    # a pool that pads by itself
    "pad_average_pool": ("x y", "", [node("Pad", ["x", "p"], ["a"]), reads("AveragePool", **POOL)], PADS, {}),
    "pad_global_pool": ("x y", "", [node("Pad", ["x", "p"], ["a"]), reads("GlobalAveragePool")], PADS, {}),
    "pad_max_pool": ("a x y", "", [node("Pad", ["x", "p"], ["a"], mode="reflect"), reads("MaxPool", **POOL)], PADS, {}),
    # what only moves values
    "max_pool": ("a x y", "w", [conv("a"), reads("MaxPool", **POOL)], W, {}),
    "reshape": ("a x y", "w", [conv("a"), reads("Reshape", "s")], {**W, "s": np.array([2, -1])}, {}),
    "transpose": ("a x y", "w", [conv("a"), reads("Transpose", perm=[0, 2, 3, 1])], W, {}),
    "unsqueeze": ("a x y", "w", [conv("a"), reads("Unsqueeze", "s")], {**W, "s": np.array([0])}, {}),
    "squeeze": ("a x y", "", [node("GlobalAveragePool", ["x"], ["a"]), reads("Squeeze", "s")], {"s": np.array([2, 3])}, {}),
    "resize": ("a x y", "w", [conv("a"), reads("Resize", "", "s", mode="nearest")], {**W, "s": np.float32([1, 1, 2, 2])}, {}),
    "gather": ("a x y", "w", [conv("a"), reads("Gather", "i", axis=1)], {**W, "i": np.array([0, 2])}, {}),
    "flatten": ("a x", "w", [conv("a"), reads("Flatten")], W, {}),  # is not on its list
    "split": ("a x y z", "w", [conv("a"), node("Split", ["a", "s"], ["y", "z"], axis=1)], {**W, "s": np.array([2, 2])},
              {"outputs": ("y", "z")}),
    "slice": ("a x y", "w", [conv("a"), reads("Slice", "s", "e")], {**W, "s": np.array([0]), "e": np.array([1])}, {}),
    # operators that are not quantized, and those around them
    "exp_relu": ("", "", [node("Exp", ["x"], ["a"]), RELU], {}, {}),
    "exp_clip": ("", "", [node("Exp", ["x"], ["a"]), CLIP], clip(0, 6), {}),
    "exp_max_pool": ("a y", "", [node("Exp", ["x"], ["a"]), reads("MaxPool", **POOL)], {}, {}),
    "exp_conv": ("a y", "w", [node("Exp", ["x"], ["a"]), reads("Conv", "w")], W, {}),
    "conv_exp": ("a x", "w", [conv("a"), reads("Exp")], W, {}),
    "relu": ("", "", [node("Relu", ["x"], ["y"])], {}, {}),
    "relu_exp": ("", "", [node("Relu", ["x"], ["a"]), reads("Exp")], {}, {}),
    "pow": ("a x", "w", [conv("a"), reads("Pow", "e")], {**W, "e": np.float32(2)}, {}),
    "hard_sigmoid": ("a x", "w", [conv("a"), reads("HardSigmoid")], W, {}),  # of slope 0.2
    "hard_sigmoid_sixth": ("a x y", "w", [conv("a"), reads("HardSigmoid", alpha=1 / 6, beta=0.5)], W, {}),
    "hard_swish": ("_inlfunc_HardSwish_HS_X a x y", "w", [conv("a"), reads("HardSwish")], W, {}),
    # constants beside an activation are weights
    "add": ("x y", "c", [node("Add", ["x", "c"], ["y"])], C, {}),
    "mul": ("x y", "c", [node("Mul", ["x", "c"], ["y"])], C, {}),
    "sub": ("x y", "c", [node("Sub", ["c", "x"], ["y"])], C, {}),
    "div": ("x y", "c", [node("Div", ["x", "c"], ["y"])], C, {}),
    "max": ("x y", "c", [node("Max", ["x", "c"], ["y"])], C, {}),
    "concat": ("x y", "c", [node("Concat", ["x", "c"], ["y"], axis=1)], {"c": normal(2, 4, 5, 6)}, {}),
    "prelu": ("x y", "s", [node("PRelu", ["x", "s"], ["y"])], {"s": np.full((4, 1, 1), 0.1, "f4")}, {}),
    "where": ("x y", "c", [node("Greater", ["x", "z"], ["m"]), node("Where", ["m", "x", "c"], ["y"])],
              {**C, "z": np.float32(0)}, {}),
    "layer_norm": ("x y", "c d", [node("LayerNormalization", ["x", "c", "d"], ["y"])],
                   {"c": normal(6), "d": normal(6, seed=1)}, {}),
    "instance_norm": ("x y", "c d", [node("InstanceNormalization", ["x", "c", "d"], ["y"])],
                      {"c": normal(4), "d": normal(4, seed=1)}, {}),
    # the rest
    "gemm_bias_given": ("x y", "g", [node("Gemm", ["x", "g", "x2"], ["y"])], {"g": normal(6, 3)},
                        {"x": (2, 6), "extra_inputs": [image("x2", 2, 3)]}),
    "matmul_of_two": ("x x2 y", "", [node("MatMul", ["x", "x2"], ["y"])], {}, {"extra_inputs": [image("x2", 2, 4, 6, 5)]}),
    "min": ("x x2 y", "", [node("Min", ["x", "x2"], ["y"])], {}, TWO),
    "softmax": ("x y", "", [node("Softmax", ["x"], ["y"])], {}, {}),
    "reduce_mean": ("a x y", "w", [conv("a"), reads("ReduceMean", axes=[1])], W, {}),
    "erf": ("a x y", "w", [conv("a"), reads("Erf")], W, {}),
    "gelu": ("a x y", "w", [conv("a"), reads("Gelu")], W, {"opset": 20}),
    "depth_to_space": ("a x y", "w", [conv("a"), reads("DepthToSpace", blocksize=2)], W, {}),
    "lp_norm": ("a x y", "w", [conv("a"), reads("LpNormalization", axis=1)], W, {}),
    "arg_max": ("a x", "w", [conv("a"), reads("ArgMax", axis=1)], W, {}),
}  # fmt: skip


def case(name: str) -> onnx.ModelProto:
    _, _, nodes, arrays, others = CASES[name]
    return build(nodes, arrays, **others)


@pytest.mark.parametrize("name", CASES)
def test_as_the_vendor_places(name: str) -> None:
    activations, weights, *_ = CASES[name]
    _, found = placed(case(name))
    assert (names(found.activations), names(found.weights), found.products) == (activations, weights, {})


@pytest.mark.parametrize("name", CASES)
def test_float_scales_are_at_the_same_places(name: str) -> None:
    activations, weights, _nodes, *_ = CASES[name]
    if "hard_sigmoid" not in name:
        _, found = placed(case(name), presets["A8W8"])
        assert names(found.activations) == activations
        assert names({**found.weights, **found.products}) == weights
        biases = {"b", "b2", "d"} & set(weights.split())
        assert names(found.products) == names(biases if name != "layer_norm" else ())


@pytest.mark.parametrize("name", CASES)
def test_every_place_is_a_tensor_of_a_node_that_was_chosen(name: str) -> None:
    graph, found = placed(case(name))
    for tensor, reader in (found.activations | found.weights | found.products).items():
        assert tensor in (*reader.inputs, *reader.outputs) and reader.outputs[0] in found.nodes
    assert found.weights.keys() <= graph.params.keys() and not found.activations.keys() & graph.arrays.keys()


# sharing


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("max_pool", "a y"),
        ("pad_max_pool", "a y"),
        ("exp_max_pool", "a y"),
        ("reshape", "a y"),
        ("transpose", "a y"),
        ("unsqueeze", "a y"),
        ("squeeze", "a y"),
        ("resize", "a y"),
        ("gather", "a y"),
        ("slice", ""),
        ("split", ""),  # which becomes Slices
        ("average_pool_relu", ""),
        ("max_pool_relu", ""),  # the pool's output is not rounded
        ("flatten", ""),
        ("concat_relu", ""),
        ("conv", ""),
    ],
)
def test_what_only_moves_values_shares_their_scale(name: str, group: str) -> None:
    graph, found = placed(case(name))
    links = shared(graph, found.nodes, found.activations)
    assert names({*links, *links.values()}) == group


def test_splits_that_stay_share_their_scale() -> None:
    graph, found = placed(case("split"), XINT8.replace(rewrites=()))
    assert shared(graph, found.nodes, found.activations) == {"y": "a", "z": "a"}


def test_a_chain_shares_the_first_scale() -> None:
    chain = [
        conv("a"),
        node("MaxPool", ["a"], ["b"], **POOL),
        node("Transpose", ["b"], ["c"]),
        node("Reshape", ["c", "s"], ["y"]),
    ]
    graph, found = placed(build(chain, {**W, "s": np.array([-1])}))
    assert shared(graph, found.nodes, found.activations) == {"b": "a", "c": "a", "y": "a"}
    config = XINT8.replace(exclude=("Transpose",))
    graph, found = placed(build(chain, {**W, "s": np.array([-1])}), config)
    assert shared(graph, found.nodes, found.activations) == {"b": "a", "y": "c"}


# absorbing


def test_absorbed_says_by_whom() -> None:
    graph = jq.load(case("convs"))
    assert {k: n.op_type for k, n in absorbed(graph).items()} == {"a": "Relu"}
    assert {k: n.op_type for k, n in absorbed(jq.load(case("pad_global_pool"))).items()} == {"a": "GlobalAveragePool"}
    for name in ("conv_clip3", "mul_relu", "conv_relu_both_out", "conv_relu_twice", "pad_max_pool", "exp_relu"):
        assert absorbed(jq.load(case(name))) == {}


def test_a_slope_that_is_computed_is_not_an_activation_s_operand() -> None:
    model = build([node("Conv", ["x", "w"], ["a"]), node("PRelu", ["x2", "a"], ["y"])], W, **TWO)  # type: ignore[arg-type]
    assert absorbed(jq.load(model)) == {}


@pytest.mark.parametrize("name", ["conv_relu", "conv_clip6", "conv_leaky", "add_relu", "gemm_relu"])
def test_nothing_is_absorbed_where_that_is_not_wanted(name: str) -> None:
    _, found = placed(case(name), XINT8.replace(fuse_activations=False))
    assert found.activations.keys() == {"a", *CASES[name][0].split()}


# rules of operators


def test_rule_of() -> None:
    graph = jq.load(case("hard_sigmoid"))
    first, last = (rule_of(graph, n) for n in graph.nodes)
    assert first is not None and first.absorbs and first.bias == "b" and last is None
    graph = jq.load(case("hard_sigmoid_sixth"))
    assert rule_of(graph, graph.nodes[1]) is not None


def test_a_custom_operator_has_scales_everywhere() -> None:
    graph = jq.load(case("conv")).replace(opsets={"": 17, "com.acme": 1})
    rule = rule_of(graph, Node("Magic", ("x",), ("y",), domain="com.acme"))
    assert rule is not None and rule.inputs is None and rule.outputs is None and not rule.shares


def test_max_pools_of_old_opsets_stay_in_float() -> None:
    assert names(placed(build(CASES["max_pool"][2], W, opset=11))[1].activations) == "a x"
    assert names(placed(build(CASES["max_pool"][2], W, opset=12))[1].activations) == "a x y"


# biases


@pytest.mark.parametrize(
    ("bias", "weights", "products"), [("weight", "b g", ""), ("int32", "g", "b"), ("float", "g", "")]
)
def test_biases(bias: Any, weights: str, products: str) -> None:
    for config in (XINT8, presets["A8W8"]):
        _, found = placed(case("gemm_relu"), config.replace(bias=bias))
        assert (names(found.weights), names(found.products)) == (weights, products)
        assert names(found.activations) == "x y"


@pytest.mark.parametrize("bias", ["weight", "int32", "float"])
def test_a_bias_that_is_computed_is_never_rounded_here(bias: Any) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["a"]),
        node("Reshape", ["x2", "s"], ["b"]),
        node("Conv", ["a", "w2", "b"], ["y"]),
    ]
    model = build(nodes, W | SECOND | {"s": np.array([4])}, extra_inputs=[image("x2", 2, 2)])
    _, found = placed(model, XINT8.replace(bias=bias, exclude=("Reshape",)))
    assert names(found.activations) == "a x y" and names(found.weights) == "w w2" and not found.products


def test_a_bias_that_two_nodes_add_has_two_scales_of_products() -> None:
    nodes = [conv("a", "b"), node("Conv", ["x", "w2", "b"], ["c"]), node("Add", ["a", "c"], ["y"])]
    _, found = placed(build(nodes, BIASED | SECOND), presets["A8W8"])
    assert len(found.products) == 2 and {n.inputs[1] for n in found.products.values()} == {"w", "w2"}
    _, found = placed(build(nodes, BIASED | SECOND))
    assert names(found.weights) == "b w w2"


def test_a_bias_at_the_scale_of_the_products() -> None:
    model = case("gemm_relu")
    graph = jq.prepare(jq.load(model), "A8W8")
    stats = jq.calibrate(graph, {"x": normal(8, 6)}, "A8W8")
    plan = make_plan(graph, stats, "A8W8")
    assert plan["b"].grid == INT32 and plan["b"].scale == np.float32(plan["x"].scale * plan["g"].scale)
    assert "b" not in make_plan(graph, stats, presets["A8W8"].replace(bias="float"))


# what of a model


def test_weights_only() -> None:
    for name in ("convs", "layer_norm", "add"):
        graph, found = placed(case(name), XINT8.replace(weights_only=True))
        assert not found.activations and names(found.weights) == CASES[name][1]
        plan = make_plan(graph, None, XINT8.replace(weights_only=True))  # which needs no statistics
        assert plan.weights.keys() == found.weights.keys() and not plan.activations


@pytest.mark.parametrize(
    ("name", "activations"),
    [
        ("conv_exp", "a x y"),
        ("flatten", "a x y"),
        ("pow", "a x y"),
        ("exp_max_pool", "a x y"),
        ("exp_relu", "a x y"),
        ("conv_relu", "a x y"),
        ("conv_leaky", "a x y"),
        ("arg_max", "a x"),
    ],
)
def test_all_operators(name: str, activations: str) -> None:
    _, found = placed(case(name), presets["VINT8"])
    assert names(found.activations) == activations
    _, found = placed(case(name), presets["BF16"])
    inner = {"a"} if name in ("conv_relu", "conv_leaky") else set()
    assert names(found.activations) == names(set(activations.split()) - inner)


def test_exclusion_takes_what_nothing_else_reads_or_writes() -> None:
    model = case("convs")
    _, found = placed(model, XINT8.replace(exclude=("conv",)))
    assert names(found.activations) == "r y" and names(found.weights) == "b2 w2"
    _, found = placed(model, XINT8.replace(exclude=("Conv",)))
    assert not found.activations and not found.weights  # the Relu follows what is not quantized
    _, found = placed(model, XINT8.replace(exclude=("Relu",)))
    assert names(found.activations) == "r x y"


def test_nothing_of_integers_is_quantized() -> None:
    nodes = [node("Shape", ["x"], ["s"]), node("Gather", ["s", "i"], ["g"]), node("Add", ["g", "g"], ["y"])]
    _, found = placed(build(nodes, {"i": np.array([0])}, x=("N", 4, 5, 6)))
    assert not found.activations and not found.weights


# the options of single nodes


def model_of_three() -> onnx.ModelProto:
    arrays = {f"w{i}": normal(4, 4, 3, 3, seed=i) / 6 for i in range(3)} | {
        f"b{i}": normal(4, seed=9 + i) for i in range(3)
    }
    nodes = []
    for i, (source, target) in enumerate(zip("xbd", "ace", strict=True)):
        nodes.append(node("Conv", [source, f"w{i}", f"b{i}"], [target], name=f"conv{i}", pads=[1, 1, 1, 1]))
        nodes.append(node("Relu", [target], ["bdy"[i]], name=f"relu{i}"))
    return build(nodes, arrays, x=(2, 4, 8, 8))


def test_overrides_reach_the_tensors_of_their_nodes() -> None:
    config = XINT8.replace(overrides={"conv1": {"weight": INT4, "activation": INT16}, "relu1": {"activation": INT16}})
    _, found = placed(model_of_three(), config)
    assert config.of(found.weights["w1"]).weight == config.of(found.weights["b1"]).weight == INT4
    assert config.of(found.weights["w0"]).weight != INT4
    assert config.of(found.activations["d"]).activation == INT16
    # A tensor has the options of the node that comes first: the one that makes it.
    assert config.of(found.activations["b"]).activation == UINT8
    assert found.activations["x"].label == "conv0"


@pytest.mark.parametrize("preset", ["XINT8", "A8W8"])
def test_mixed_precision_from_the_options_to_the_file(preset: str) -> None:
    wide = {"weight": INT4, "activation": INT16}
    config = presets[preset].replace(overrides={"conv1": wide, "relu1": {"activation": INT16}}, cle=False)
    graph = jq.prepare(jq.load(model_of_three()), config)
    x = normal(8, 2, 4, 8, 8, seed=5)
    stats = jq.calibrate(graph, [{"x": v} for v in x], config)
    plan = make_plan(graph, stats, config)
    assert plan["w1"].grid == INT4.narrow and plan["w0"].grid.bits == plan["w2"].grid.bits == 8
    assert plan["d"].grid == INT16 and plan["x"].grid.bits == plan["b"].grid.bits == plan["y"].grid.bits == 8
    model = jq.export(graph, plan)
    types = {i.data_type for i in model.graph.initializer}
    assert {TensorProto.INT4, TensorProto.INT16, TensorProto.INT8} < types
    expected = np.asarray(jq.fake_quant(graph)(graph.params, plan, {"x": x[0]})["y"])
    (found,) = onnxruntime_outputs(model, {"x": x[0]})
    np.testing.assert_allclose(found, expected, atol=float(plan["y"].scale) * 1.01)
    assert np.mean(found != expected) < 0.01
    assert np.std(expected) > 4 * float(plan["y"].scale)


def test_integers_in_a_network_of_floats() -> None:
    eight = {"weight": INT8, "activation": INT8}
    config = presets["BF16"].replace(overrides={"conv1": eight, "relu1": {"activation": INT8}}, cle=False)
    x = normal(8, 2, 4, 8, 8, seed=5)
    found = jq.quantize(model_of_three(), [{"x": v} for v in x], config)
    assert found.plan["w1"].grid == INT8.narrow and found.plan["d"].grid == INT8
    assert found.plan["w0"].grid == found.plan["x"].grid == BFLOAT16
    expected = np.asarray(jq.fake_quant(found.graph)(found.graph.params, found.plan, {"x": x[0]})["y"])
    (output,) = onnxruntime_outputs(found.model, {"x": x[0]})
    np.testing.assert_allclose(output, expected, atol=np.std(expected) / 20)


def test_weights_of_other_methods_per_node() -> None:
    config = presets["A8W8"].replace(overrides={"conv2": {"per_channel": True, "bias": "float"}}, cle=False)
    graph = jq.prepare(jq.load(model_of_three()), config)
    stats = jq.calibrate(graph, [{"x": normal(2, 4, 8, 8)}], config)
    plan = make_plan(graph, stats, config)
    assert np.shape(plan["w2"].scale) == (4,) and np.shape(plan["w0"].scale) == ()
    assert "b2" not in plan and "b1" in plan
    model = jq.export(graph, plan)
    assert np.isfinite(onnxruntime_outputs(model, {"x": normal(2, 4, 8, 8)})[0]).all()
