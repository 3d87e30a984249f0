"""Noise planted at one known layer is found there, and shares add up, against onnxruntime without the noise."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import jq
from jq.evidence.origins import largest

LAYERS, CHANNELS = 6, 8
SHAPE = ("N", CHANNELS, 6, 6)


def chain(
    coarse: dict[str, float] | None = None, joined: bool = False, only: frozenset[str] = frozenset(), boost: float = 1.0
) -> onnx.ModelProto:
    """Six convolutions with ReLUs; with `coarse` in QDQ, the steps of the tensors that it names so many times wider.

    If they are joined, what the third gives is computed by two branches, one of them a sixteenth of the other, that a
    Concat joins; the weights that read it are `boost` times as large. `only` names the tensors that are quantized, if not all.
    """
    rng, nodes, arrays = np.random.default_rng(3), list[onnx.NodeProto](), dict[str, np.ndarray]()

    def rounded(name: str, scale: float, dtype: type = np.int8) -> str:
        if coarse is None or (only and name not in only):
            return name
        arrays[f"{name}_scale"], arrays[f"{name}_zero"] = np.float32(scale * coarse.get(name, 1)), np.array(0, dtype)
        codes, back = f"{name}_QuantizeLinear_Output", f"{name}_DequantizeLinear_Output"
        nodes.append(helper.make_node("QuantizeLinear", [name, f"{name}_scale", f"{name}_zero"], [codes]))
        nodes.append(helper.make_node("DequantizeLinear", [codes, f"{name}_scale", f"{name}_zero"], [back]))
        return back

    at = rounded("x", 2**-5)
    for i in range(1, LAYERS + 1):
        weight, made = f"w{i}", f"c{i}"
        inputs = 2 * CHANNELS if joined and i == 4 else CHANNELS
        arrays[weight] = (rng.standard_normal((CHANNELS, inputs, 3, 3)) * np.sqrt(2 / (9 * inputs))).astype(np.float32)
        if joined and i == 4:
            arrays[weight][:, :CHANNELS] *= boost
        nodes.append(helper.make_node("Conv", [at, rounded(weight, 2**-7)], [made], name=f"conv_{i}", pads=[1] * 4))
        nodes.append(helper.make_node("Relu", [made], [f"r{i}"], name=f"relu_{i}"))
        at = f"r{i}" if i == LAYERS else rounded(f"r{i}", 2**-5)
        if joined and i == 3:
            arrays["factor"] = np.float32([2**-4]).reshape(1, 1, 1, 1)
            nodes.append(helper.make_node("Mul", [at, "factor"], ["small"], name="shrink"))
            nodes.append(helper.make_node("Neg", [at], ["large"], name="negate"))
            sides = [rounded("small", 2**-5), rounded("large", 2**-5)]
            nodes.append(helper.make_node("Concat", sides, ["j"], name="join", axis=1))
            at = rounded("j", 2**-5)
    nodes.append(helper.make_node("Identity", [at], ["y"], name="last"))
    sides = [helper.make_tensor_value_info(n, TensorProto.FLOAT, SHAPE) for n in ("x", "y")]
    graph = helper.make_graph(
        nodes, "chain", sides[:1], sides[1:], [numpy_helper.from_array(a, k) for k, a in arrays.items()]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def output(model: onnx.ModelProto, data: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": data})[0].astype(np.float64)


@pytest.fixture
def data(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((12, *SHAPE[1:])).astype(np.float32)


def error(coarse: dict[str, float], data: np.ndarray, joined: bool = False) -> float:
    return float(np.square(output(chain(coarse, joined), data) - output(chain(None, joined), data)).sum())


@pytest.mark.parametrize(
    ("tensor", "factor", "layer", "part"),
    [("w3", 32.0, "conv_3", "weights"), ("r2", 32.0, "conv_2", "rounding"), ("w5", 32.0, "conv_5", "weights")],
)
def test_the_planted_layer_is_named_and_its_share_is_what_its_noise_makes(
    tensor: str, factor: float, layer: str, part: str, data: np.ndarray
) -> None:
    coarse = {tensor: factor}
    report = jq.compare(chain(), chain(coarse), data)
    made = report.attribution
    assert made is not None and made.samples == 12
    first = made.layers[0]
    assert (first.name if part == "weights" else first.tensors[-1], first.cause) in ((layer, part), (tensor, part))
    assert made.whole == pytest.approx(1, abs=0.05)
    without = 1 - error({}, data) / error(coarse, data)
    assert first.effect == pytest.approx(without, abs=0.1) and without > 0.7
    assert [m.name for m in made.leading()] == [first.name] and first.name in report.verdict.sentences[-1]
    for row in (r for r in report.rows if r.origin is not None):
        assert row.origin.upstream + sum(row.origin.parts.values()) == pytest.approx(1, abs=0.05)
    of_tensor = {r.tensor: r for r in report.rows}
    named = of_tensor["c" + tensor[1:]] if part == "weights" else of_tensor[tensor]
    assert named.origin is not None and largest(named.origin.parts) == part


def test_a_constraint_that_widens_a_step_is_named(data: np.ndarray) -> None:
    """A Concat's operands have one position on the NPU: the small one's values are lost in the large one's step."""
    report = jq.compare(chain(joined=True), chain({}, joined=True), data)
    rows = {r.tensor: r for r in report.rows}
    assert rows["small"].error.forbidden and rows["small"].reason == "constraint"
    parts = rows["small"].origin.parts
    assert parts["constraint"] > 5 * abs(parts["rounding"])
    boosted = {layer.name: layer for layer in report.attribution.layers}["shrink"]
    assert boosted.cause == "constraint"


def test_the_layer_that_a_constraint_widens_is_on_top(data: np.ndarray) -> None:
    """Only the joined branches are rounded, and the small one, which shares the large one's step, matters most."""
    only = frozenset({"small", "large", "j"})
    quantized = chain({}, True, only, boost=8.0)
    report = jq.compare(chain(None, True, boost=8.0), quantized, data)
    made = report.attribution
    assert made is not None and (made.layers[0].name, made.layers[0].cause) == ("shrink", "constraint")
    assert made.whole == pytest.approx(1, abs=0.05)
    floats = output(chain(None, True, boost=8.0), data)
    whole, without = (
        float(np.square(output(chain({}, True, kept, boost=8.0), data) - floats).sum())
        for kept in (only, frozenset({"large"}))
    )
    assert made.layers[0].effect == pytest.approx(1 - without / whole, abs=0.1)
    assert report.verdict.sentences[0].endswith("shrink.")
    assert sum(block.effect for block in made.blocks) == pytest.approx(made.whole)


def test_blocks_are_sums_of_their_layers(data: np.ndarray) -> None:
    report = jq.compare(chain(), chain({"w3": 32.0}), data)
    made, block_of = report.attribution, {layer.name: layer.block for layer in report.layers}
    assert made is not None and made.blocks[0].name == block_of["conv_3"]
    for block in made.blocks:
        inside = [layer for layer in made.layers if (block_of.get(layer.name) or layer.name) == block.name]
        assert block.effect == pytest.approx(sum(layer.effect for layer in inside))


def test_a_form_of_an_operator_is_named(data: np.ndarray) -> None:
    def model(op: str) -> onnx.ModelProto:
        made = chain()
        for node in made.graph.node:
            if node.name == "relu_4":
                node.op_type = op
        return made

    report = jq.compare(model("Sigmoid"), model("HardSigmoid"), data)
    assert (report.attribution.layers[0].tensors[-1], report.attribution.layers[0].cause) == ("r4", "form")
    rows = {r.tensor: r for r in report.rows}
    assert rows["r4"].reason == "form" and rows["y"].reason == "upstream"


def test_equal_models_have_no_origins(data: np.ndarray) -> None:
    report = jq.compare(chain(), chain(), data)
    assert report.attribution is None and not report.advice
    assert Counter(r.origin for r in report.rows) == {None: len(report.rows)}


def test_scores_are_judged_and_commands_can_be_copied() -> None:
    images, _ = jq.zoo.calibration_set()
    path = jq.zoo.path("fashion_resnet")
    model = jq.quantize(path, images[:32], "A8W8").model
    report = jq.compare(path, model, images[:64])
    one, other = (jq.evaluate.model_scores(m, images[:64]).values.astype(np.float64) for m in (path, model))
    same = np.mean(one.argmax(1) == other.argmax(1))
    told = report.verdict.outputs[0]
    assert told.same == pytest.approx(same) and next(report.verdict.lines()).endswith("on 64 samples")
    p, q = (np.exp(v) / np.exp(v).sum(1, keepdims=True) for v in (one, other))
    divergence = float((p * np.log(p / q)).sum(1).mean())
    assert told.kl == pytest.approx(divergence, rel=0.1)  # onnxruntime fuses what it computes
    assert all(
        command.startswith(f"jq-quant quantize {path} --data calib/ --config A8W8") for _, command in report.advice
    )
    assert f"jq-quant quantize {path}" in report.summary()
