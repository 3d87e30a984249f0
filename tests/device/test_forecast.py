"""`jq.npu.forecast` on the structures of the vendor's logs, with counts by hand."""

from __future__ import annotations

import json
import re
from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import jq
from jq.npu.facts import CHIPS, PLACE_RULES
from jq.npu.placing import names
from tests.npu import structures
from tests.passes.models import build

FORMATS = ("XINT8", "A8W8", "A16W8")


def forecast_of(model: onnx.ModelProto, config: str | jq.QuantConfig, chip: str = "stx", backend: str | None = None):
    return jq.npu.forecast(model, chip, backend, config=config)


def ops_on_cpu(forecast) -> Counter:
    return Counter(p.op for p in forecast.nodes.values() if p.place == "cpu")


@pytest.mark.parametrize("format", FORMATS)
def test_a_network_of_layers_with_relu_is_whole(format):
    forecast = forecast_of(structures.residual(), format)
    assert forecast.format == format
    assert forecast.counts["cpu"] == 0 and forecast.counts["vitis_ep_cpu"] == 2  # what enters and what leaves
    assert (forecast.subgraphs, forecast.subgraphs_run, forecast.breaks, forecast.advice) == (1, 1, (), ())


@pytest.mark.parametrize("format", FORMATS)
def test_layers_with_a_clip_leave_the_npu_unless_they_are_depthwise_or_wide(format):
    forecast = forecast_of(structures.inverted_bottleneck(3), format)
    if format == "A16W8":
        assert forecast.counts["cpu"] == 0 and forecast.subgraphs == 1
        return
    assert ops_on_cpu(forecast) == {"Conv": 5, "Clip": 5}  # the stem, three expansions, the last
    assert forecast.subgraphs == 5 and {b.rule.name for b in forecast.breaks} == {"clip-after-conv"}
    # Each has quantizers of its input, weight and bias in front and one behind; an Add shares the input's of three.
    assert forecast.counts["vitis_ep_cpu"] == 2 + 5 * 4 - 3 and forecast.copies == {"npu": 0, "vitis_ep_cpu": 3}
    by_name = {a.change: a for a in forecast.advice}
    assert by_name["relu6_to_relu"].subgraphs == 1 and by_name["relu6_to_relu"].counts["cpu"] == 0
    assert by_name["format A16W8"].subgraphs == 1


def test_gates_break_xint8_and_not_a8w8():
    model = structures.squeeze_and_excite(2)
    forms = jq.presets["XINT8"].replace(form_loss=None)  # every Sigmoid becomes HardSigmoid and a factor
    broken, kept, whole = (forecast_of(model, c) for c in (forms, jq.presets["XINT8"].replace(forms=()), "A8W8"))
    assert ops_on_cpu(broken) == {"HardSigmoid": 4, "Mul": 4} and broken.subgraphs == 5
    assert ops_on_cpu(kept) == {"Sigmoid": 4} and kept.subgraphs == 5
    assert whole.counts["cpu"] == 0 and whole.subgraphs == 1
    advice = {a.change: a for a in broken.advice}
    assert advice["format A8W8"].subgraphs == 1 and advice["backend X1"].subgraphs == 1
    kept_advice = {a.change: a for a in kept.advice}
    assert "backend X1" not in kept_advice  # which has no Sigmoid either
    assert kept_advice["backend X1 + hard_sigmoid"].subgraphs == 1
    assert advice["hard_swish"].subgraphs == 3 and advice["hard_swish"].counts["cpu"] == 4  # gates of channels are left
    together = advice["hard_sigmoid_to_clip + hard_swish"]
    assert (together.subgraphs, together.counts["cpu"]) == (1, 0)
    assert forecast_of(model, forms, "phx").counts["cpu"] == 0  # X1 has HardSigmoid


@pytest.mark.parametrize("format", FORMATS)
def test_channel_shuffles_break_every_format(format):
    forecast = forecast_of(structures.shuffled(3), format)
    extra = {"ReduceMean": 1, "Mul": 1} if format == "XINT8" else {}  # a mean with a factor is no pair that is known
    assert ops_on_cpu(forecast) == {"Reshape": 6, "Transpose": 3, **extra}
    assert forecast.subgraphs == 4 + len(extra) // 2
    assert min(a.subgraphs for a in forecast.advice) == 1
    assert min(a.counts["cpu"] for a in forecast.advice) == 0


def test_batchnorms_of_their_own_and_concats_leave_little():
    forecast = forecast_of(structures.dense(3), "XINT8")
    assert forecast.subgraphs == 5 and forecast.subgraphs_run == 2  # the stem and the head
    # Four BatchNormalizations with Relu; three times a layer with Relu, a layer, and the Concat.
    assert ops_on_cpu(forecast) == {"Conv": 4 + 6, "Relu": 4 + 3, "Concat": 3}
    assert {"depthwise-1x1", "concat-from-outside"} == {b.rule.name for b in forecast.breaks}
    assert next(a for a in forecast.advice if a.change == "depthwise_to_dense").subgraphs == 1


def test_a_node_behind_the_last_quantizer_is_the_cpus():
    net = structures.Net()
    net.op("Flatten", net.op("GlobalAveragePool", net.op("Relu", net.conv("x", 3, 5, 3))))
    net.nodes[-1].output[0] = "y"
    forecast = forecast_of(net.model(), jq.presets["XINT8"].replace(strict_quark=True, cle=False))
    assert ops_on_cpu(forecast) == {"Flatten": 1} and forecast.subgraphs == 1
    assert [b.rule.name for b in forecast.breaks] == ["not-quantized"]


@pytest.mark.parametrize("format", ["A8W8", "A16W8"])
def test_x1_takes_xint8_alone(format):
    forecast = forecast_of(structures.residual(), format, "phx")
    assert forecast.counts["npu"] == 0 and forecast.subgraphs == 0
    assert {b.rule.name for b in forecast.breaks} == {"backend-format"}
    assert next(a for a in forecast.advice if a.change == "format XINT8").subgraphs == 1
    assert forecast_of(structures.residual(), "XINT8", "hpt").subgraphs == 1


def test_a_layer_left_in_float_is_the_cpus_with_its_activation():
    model = structures.residual(2)
    conv = [n.name for n in model.graph.node if n.op_type == "Conv"][1]
    forecast = forecast_of(model, jq.presets["XINT8"].replace(exclude=(conv,)))
    assert ops_on_cpu(forecast) == {"Conv": 1, "Relu": 1} and forecast.nodes[conv].place == "cpu"
    assert forecast.subgraphs == 2 and {b.rule.name for b in forecast.breaks} == {"not-quantized"}


def test_a_resize_that_interpolates_is_the_cpus_and_a_nearest_one_is_not():
    for mode, count in (("linear", 1), ("nearest", 0)):
        net = structures.Net()
        x = net.op("Relu", net.conv("x", 3, 4, 3))
        x = net.op("Resize", x, "", net.array("scales", [1, 1, 2, 2]), mode=mode)
        forecast = forecast_of(net.classify(net.op("Relu", net.conv(x, 4, 4)), 4), "XINT8")
        assert forecast.counts["cpu"] == count and forecast.subgraphs == 1 + count


def test_nodes_without_inputs_are_the_cpus():
    at = onnx.numpy_helper.from_array(np.int64(0), "at")
    nodes = [
        helper.make_node("SequenceEmpty", [], ["none"]),
        helper.make_node("SequenceInsert", ["none", "x"], ["one"]),
        helper.make_node("SequenceAt", ["one", "at"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 3]) for name in "xy"]
    graph = helper.make_graph(nodes, "sequence", ends[:1], ends[1:], [at])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    forecast = forecast_of(model, "XINT8")
    assert forecast.counts["npu"] == 0 and "SequenceEmpty" in ops_on_cpu(forecast)


def test_formats_that_the_provider_does_not_read():
    data = np.ones((2, 3, 8, 8), np.float32)
    made = jq.quantize(structures.residual(1), data, "XINT8", format="fix_neuron").model
    forecast = jq.npu.forecast(made)
    assert forecast.counts["npu"] == 0 and forecast.format == "" and forecast.advice == ()
    assert any("QuantizeLinear" in note for note in forecast.notes)
    wide = forecast_of(structures.residual(1), "INT16_CNN_DEFAULT")  # weights of 16 bits
    assert {b.rule.name for b in wide.breaks} == {"format"} and wide.breaks[0].source
    codes = jq.quantize(structures.residual(1), data, "A8W8", format="qoperator").model
    placed = jq.npu.forecast(codes).nodes.values()
    assert {p.place for p in placed if p.op == "QLinearConv"} == {"npu"}


def test_a_subgraph_without_a_layer_is_better_left_in_float():
    net = structures.Net()
    x = net.op("Sigmoid", net.op("Relu", net.conv("x", 3, 8, 3)))
    x = net.op("Sigmoid", net.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2]))
    forecast = forecast_of(net.classify(net.conv(x, 8, 8), 8), jq.presets["XINT8"].replace(forms=()))
    assert forecast.subgraphs == 3
    advice = next(a for a in forecast.advice if a.change == "exclude")
    assert advice.subgraphs == 2 and 'exclude=["maxpool' in advice.what


def test_every_node_has_a_place_and_a_rule_with_a_source():
    quantized = jq.quantize(structures.inverted_bottleneck(1), np.ones((2, 3, 8, 8), np.float32), "XINT8").model
    forecast = jq.npu.forecast(quantized)
    assert len(forecast.nodes) == len(quantized.graph.node) == sum(forecast.counts.values())
    assert [p.op for p in forecast.nodes.values()] == [n.op_type for n in quantized.graph.node]
    for place, rule, *_ in forecast.nodes.values():
        assert place in forecast.counts and PLACE_RULES[rule].source
    assert all(r.date and r.evidence in ("documented", "log", "guess") for r in PLACE_RULES.values())
    assert next(r.name for r in forecast.rules) == "quantizer"


def test_names_are_those_of_outputs_where_they_are_missing_or_taken():
    nodes = [helper.make_node("Relu", ["x"], ["a"], name="r"), helper.make_node("Relu", ["a"], ["y"], name="r")]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [value("x", TensorProto.FLOAT, [1])], [value("y", TensorProto.FLOAT, [1])])
    assert list(names(jq.load(helper.make_model(graph)))) == ["r", "y"]


def test_the_forecast_as_json_and_as_a_page(tmp_path):
    forecast = forecast_of(structures.inverted_bottleneck(1), "XINT8")
    forecast.to_json(tmp_path / "f.json")
    told = json.loads((tmp_path / "f.json").read_text())
    assert told["counts"] == dict(forecast.counts) and told["subgraphs"] == forecast.subgraphs
    forecast.to_html(tmp_path / "f.html")
    page = (tmp_path / "f.html").read_text()
    places = re.findall(r'class="box [^"]* (\w+)"', page)
    assert places.count("cpu") == len(forecast.breaks) and places.count("npu") == len(forecast.units) - len(
        forecast.breaks
    )
    assert "clip-after-conv" in page and '<option value="place">' in page and '<option value="loss">' not in page
    assert "clip-after-conv" in str(forecast) and "relu6_to_relu" in str(forecast)


def test_chips_and_backends_that_are_not():
    model = structures.residual(1)
    with pytest.raises(jq.ConfigError, match="chip needs one of phx"):
        jq.npu.forecast(model, "strix")
    with pytest.raises(jq.ConfigError, match="chip 'phx' needs backend X1; got 'X2'"):
        jq.npu.forecast(model, "phx", "X2")
    with pytest.raises(jq.ConfigError, match="quantized already"):
        jq.npu.forecast(jq.quantize(model, np.ones((2, 3, 8, 8), np.float32)).model, config="XINT8")
    assert [c.backends[0] for c in CHIPS.values()] == ["X1", "X1", "X2", "X2"]


def test_x1_takes_operators_in_the_settings_that_become_xirs():
    def place_of(kind: str, *operands: str, opset: int = 17, **attrs: object) -> tuple[str, str]:
        net = structures.Net()
        net.arrays |= {"sides": np.array([1, 1, 2, 2], np.float32), "low": np.float32(-1), "high": np.float32(1)}
        x = net.op(kind, net.conv("x", 3, 8, 3), *operands, **attrs)
        used = {i for n in net.nodes for i in n.input}
        net.arrays = {k: v for k, v in net.arrays.items() if k in used}
        model = net.classify(net.conv(x, 8, 8), 8)
        made = jq.npu.forecast(model, "phx", config=jq.presets["XINT8"].replace(strict_quark=True))
        return next((p.place, p.rule) for p in made.nodes.values() if p.op == kind)

    assert place_of("Clip", "low", "high")[0] == "npu"
    assert place_of("Clip", "low") == ("cpu", "x1-setting")
    assert place_of("Resize", "", "sides", mode="nearest") == ("npu", "listed")
    for attrs in ({"mode": "cubic"}, {"mode": "linear", "coordinate_transformation_mode": "tf_half_pixel_for_nn"}):
        assert place_of("Resize", "", "sides", **attrs) == ("cpu", "x1-setting")


def test_x1_is_advised_of_hard_sigmoids():
    config = jq.presets["XINT8"].replace(form_loss=0.0)
    made = jq.npu.forecast(structures.squeeze_and_excite(), "phx", config=config)
    assert made.counts["cpu"] > 0
    advice = {a.change: a for a in made.advice}
    assert advice["hard_sigmoid"].subgraphs == 1 and "form_loss=None" in advice["hard_sigmoid"].what
    after = jq.npu.forecast(structures.squeeze_and_excite(), "phx", config=config.replace(form_loss=None))
    assert (after.counts["cpu"], after.subgraphs) == (0, 1) == (advice["hard_sigmoid"].counts["cpu"], 1)
    on_x2 = jq.npu.forecast(structures.squeeze_and_excite(), "stx", config=config)
    assert "hard_sigmoid" not in {a.change for a in on_x2.advice}
    wide = jq.npu.forecast(structures.hard_gates(), config="A16W8")  # which lists neither HardSwish nor HardSigmoid
    assert wide.counts["cpu"] > 0 and not {"hard_swish", "hard_sigmoid"} & {a.change for a in wide.advice}


def test_free_dims_are_noted():
    model = structures.residual(1)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    assert any("shapes must be fixed" in note for note in jq.npu.forecast(model).notes)
    assert not any("shapes must be fixed" in note for note in jq.npu.forecast(structures.residual(1)).notes)


def attention(tokens: int = 6, width: int = 8) -> onnx.ModelProto:
    """A layer, queries, keys and values through five dims, their product, and the first token's scores."""
    net = structures.Net()
    x = net.op("MatMul", "x", net.array("embed", net.rng.standard_normal((4, width))))
    joint = net.op("MatMul", x, net.array("joint", net.rng.standard_normal((width, 3 * width))))
    apart = net.op("Reshape", joint, net.array("apart", [1, tokens, 3, 2, width // 2], np.int64))
    turned = net.op("Transpose", apart, perm=[2, 0, 3, 1, 4])
    query, key, value = (net.op("Gather", turned, net.array(f"i{i}", i, np.int64), axis=0) for i in range(3))
    scores = net.op("Softmax", net.op("MatMul", query, net.op("Transpose", key, perm=[0, 1, 3, 2])), axis=-1)
    mixed = net.op("Transpose", net.op("MatMul", scores, value), perm=[0, 2, 1, 3])
    flat = net.op("Reshape", mixed, net.array("together", [1, tokens, width], np.int64))
    first = net.op("Gather", flat, net.array("first", 0, np.int64), axis=1)
    weight = net.array("head", net.rng.standard_normal((width, 3)))
    net.nodes.append(helper.make_node("Gemm", [first, weight, net.array("head_bias", np.zeros(3))], ["y"], "gemm"))
    return build(net.nodes, net.arrays, x=(1, tokens, 4))


@pytest.mark.parametrize("format", FORMATS)
def test_attention_through_five_dims_and_gathers_is_brought_to_the_npu(format):
    broken = forecast_of(attention(), format)
    assert {b.rule.name for b in broken.breaks} == {"rank", "not-listed"} and broken.subgraphs > 1
    advice = {a.change: a for a in broken.advice}
    together = advice["transpose_in_four + gather_to_slice"]
    assert (together.subgraphs, together.counts["cpu"]) == (1, 0)
    made = forecast_of(attention(), jq.presets[format].replace(whole=0.0))  # what the advice says it does
    assert (dict(made.counts), made.subgraphs) == (dict(together.counts), 1)


def test_operators_that_are_listed_and_not_quantized_are_advised():
    net = structures.Net()
    x = net.op("Softsign", net.op("Elu", net.conv("x", 3, 8, 3)))
    model = net.classify(net.op("Relu", net.conv(x, 8, 8, 3)), 8)
    broken = forecast_of(model, "XINT8")
    (break_,) = broken.breaks
    assert break_.ops == ("Elu", "Softsign")
    advice = {a.change: a for a in broken.advice}["quantize_listed"]
    made = forecast_of(model, jq.presets["XINT8"].replace(op_types=None))
    assert (advice.counts["cpu"], advice.subgraphs) == (made.counts["cpu"], made.subgraphs) == (0, 1)
    assert "quantize_listed" not in {a.change for a in forecast_of(model, "A8W8").advice}  # where none is listed


def test_what_no_change_brings_to_the_npu_is_said():
    net = structures.Net()
    slopes = net.array("slopes", np.full((8, 1, 1), 0.1))
    x = net.op("PRelu", net.conv("x", 3, 8, 3), slopes)
    x = net.op("MaxPool", net.op("PRelu", net.op("MaxPool", x, kernel_shape=[1, 1]), slopes), kernel_shape=[1, 1])
    forecast = forecast_of(net.classify(net.conv(x, 8, 8, 3), 8), "XINT8")
    (note,) = (n for n in forecast.notes if n.startswith("no known change"))
    assert "PRelu (1)" in note and "Conv" not in note
    whole = forecast_of(structures.residual(), "XINT8")
    assert not [n for n in whole.notes if n.startswith("no known change")]
