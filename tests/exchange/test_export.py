"""Exported models: what is in the file, in which form, and that it is written whole or not at all."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import jq
from jq.exchange.export import quantized_graph
from jq.passes.explicit import explicit
from jq.passes.opset import with_opset
from tests.conftest import onnxruntime_outputs
from tests.npu import structures

node = helper.make_node


def built(nodes, shape, outputs, weights=(), opset=17):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, shape)],
        [onnx.ValueInfoProto(name=o) for o in outputs],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in dict(weights).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def run(model, x):
    return onnxruntime_outputs(model, {"input": x})[0]


def attributes(found):
    return {a.name: helper.get_attribute_value(a) for a in found.attribute}


@pytest.fixture(scope="module")
def images():
    return jq.zoo.calibration_set()[0]


@pytest.fixture(scope="module")
def result(images):
    return jq.quantize(jq.zoo.path("fashion_mobilenet"), images[:32])


@pytest.fixture(scope="module")
def every_explicit():
    """Each operator of which attributes are written out, between quantizers."""
    rng = np.random.default_rng(0)
    sizes = {"w": (4, 3, 3, 3), "v": (4, 4, 2, 2), "u": (4, 4, 3), "g": (256, 5)}
    weights = {k: rng.normal(0, 0.3, s).astype(np.float32) for k, s in sizes.items()}
    weights |= {"line": np.array([1, 4, 64]), "image": np.array([1, 4, 8, 8])}
    pool, same = {"kernel_shape": [2, 2]}, {"auto_pad": "SAME_UPPER"}
    chain = [
        ("Conv", ["w"], same), ("Abs", [], {}), ("Reshape", ["line"], {}), ("Conv", ["u"], same), ("Abs", [], {}),
        ("Reshape", ["image"], {}), ("AveragePool", [], {**pool, **same}), ("Neg", [], {}),
        ("MaxPool", [], {**pool, **same}), ("LpPool", [], pool), ("Neg", [], {}),
        ("AveragePool", [], {**pool, "pads": [1, 1, 0, 0], "count_include_pad": 1}), ("Abs", [], {}),
        ("ConvTranspose", ["v"], {}), ("LeakyRelu", [], {}), ("Neg", [], {}), ("HardSigmoid", [], {}),
        ("Softmax", [], {}), ("Flatten", [], {}), ("Gemm", ["g"], {}), ("Neg", [], {}),
    ]  # fmt: skip
    names = ["x", *(f"t{i}" for i in range(len(chain) - 1)), "y"]
    nodes = [node(op, [names[i], *more], [names[i + 1]], **a) for i, (op, more, a) in enumerate(chain)]
    x = rng.standard_normal((4, 3, 8, 8), np.float32)
    model = built(nodes, [1, 3, 8, 8], ["y"], weights, opset=13)
    config = jq.presets["INT8_CNN_DEFAULT"].replace(op_types=None)
    return x, jq.quantize(model, x, config, opset=13)


class TestFile:
    def test_quantizers_have_the_vendors_names(self, result):
        names = {n.name for n in result.model.graph.node}
        arrays = {t.name for t in result.model.graph.initializer}
        assert {"input_QuantizeLinear", "input_DequantizeLinear", "stem.weight_DequantizeLinear"} <= names
        assert {"input_scale", "input_zero_point", "stem.weight_quantized"} <= arrays
        outputs = {n.output[0] for n in result.model.graph.node if n.op_type == "DequantizeLinear"}
        assert "logits" in outputs  # an output of the graph keeps its name, behind its quantizer

    def test_activations_are_uint8_around_128_and_weights_int8(self, result):
        types = Counter(
            (t.data_type, int(numpy_helper.to_array(t)))
            for t in result.model.graph.initializer
            if t.name.endswith("_zero_point")
        )
        assert set(types) == {(TensorProto.UINT8, 128), (TensorProto.INT8, 0)}

    def test_every_attribute_is_written_out(self, result):
        wanted = {
            "Conv": {"auto_pad", "dilations", "group", "kernel_shape", "pads", "strides"},
            "Gemm": {"alpha", "beta", "transA", "transB"},
        }
        for found in result.model.graph.node:
            assert wanted.get(found.op_type, set()) <= attributes(found).keys()

    def test_shapes_are_filled_in_and_follow_the_batch(self, result):
        types = {v.name: v.type.tensor_type for v in result.model.graph.value_info}
        for found in result.model.graph.node:
            for name in found.output:
                assert name in types or name == "logits"
        dims = [d.dim_param or d.dim_value for d in types["input_DequantizeLinear_Output"].shape.dim]
        assert dims == ["N", 1, 28, 28]

    def test_metadata_tell_where_the_model_comes_from(self, result):
        found = {p.key: p.value for p in result.model.metadata_props}
        assert jq.QuantConfig.from_dict(json.loads(found["jq.config"])) == jq.presets["XINT8"]
        assert found["jq.version"] == jq.__version__ and found["jq.seed"] == "0"
        assert len(found["jq.source_sha256"]) == 64

    def test_the_checker_accepts_it(self, result):
        onnx.checker.check_model(result.model, full_check=True)

    def test_the_same_inputs_give_the_same_bytes(self, result, images):
        again = jq.quantize(jq.zoo.path("fashion_mobilenet"), images[:32])
        assert again.model.SerializeToString() == result.model.SerializeToString()

    def test_a_file_takes_its_place_whole(self, result, tmp_path, monkeypatch):
        path = tmp_path / "deep" / "model.onnx"
        jq.export(result.graph, result.plan, path=path)
        before = path.read_bytes()
        assert [p.name for p in path.parent.iterdir()] == ["model.onnx"]

        def refuses(*args, **kwargs):
            raise onnx.checker.ValidationError("it is\nwrong")

        monkeypatch.setattr(onnx.checker, "check_model", refuses)
        with pytest.raises(jq.ModelError, match="checker refuses the model: it is"):
            jq.export(result.graph, result.plan, path=path)
        assert path.read_bytes() == before and len(list(path.parent.iterdir())) == 1


class TestFormats:
    @pytest.mark.parametrize("format", ["vitis_qdq", "fix_neuron"])
    def test_forms_of_the_older_flow_compute_the_same(self, result, images, format):
        model = jq.export(result.graph, result.plan, format=format)
        x = {"input": images[-8:]}
        graph = jq.load(model)
        found = jq.trace(graph)(graph.params, x)["logits"]
        np.testing.assert_array_equal(found, run(result.model, images[-8:]))

    def test_fix_neuron_says_bits_and_position(self, result):
        model = jq.export(result.graph, result.plan, format="fix_neuron")
        found = {n.input[0]: n for n in model.graph.node if n.op_type == "FixNeuron"}
        assert found.keys() == {*result.plan} - {"logits"} | {"logits_QuantizeLinear_Input"}
        position = -int(result.plan["input"].exponent)
        assert found["input"].domain == "ai.onnx.contrib"
        assert attributes(found["input"]) == {"bit_width": 8, "pos": position}

    @pytest.mark.parametrize("options", [{}, {"per_channel": True}])
    def test_fix_neuron_has_no_other_scales_than_powers_of_two(self, options):
        nodes = [node("Conv", ["x", "w"], ["y"])]
        weights = {"w": np.random.default_rng(0).standard_normal((4, 2, 1, 1), np.float32)}
        model = built(nodes, ["N", 2, 4, 4], ["y"], weights)
        x = np.random.default_rng(1).standard_normal((4, 2, 4, 4), np.float32)
        with pytest.raises(jq.ConfigError, match=r"one power of two per tensor, but the scale of 'w'"):
            jq.quantize(model, x, jq.presets["A8W8"].replace(**options), format="fix_neuron")

    @pytest.mark.parametrize(("opset", "domain"), [(17, "com.microsoft"), (21, "")])
    def test_16_bits_are_standard_from_opset_21_on(self, images, opset, domain):
        result = jq.quantize(jq.zoo.path("fashion_resnet"), images[:16], "A16W8", opset=opset)
        quantizers = {n.domain for n in result.model.graph.node if n.op_type == "QuantizeLinear"}
        assert quantizers == {domain}
        assert {o.domain: o.version for o in result.model.opset_import}[""] == opset
        x = {"input": images[-8:]}
        ours = jq.fake_quant(result.graph)(result.graph.params, result.plan, x)["logits"]
        np.testing.assert_allclose(run(result.model, images[-8:]), ours, atol=2 * float(result.plan["logits"].scale))

    @pytest.mark.parametrize("opset", [13, 17, 21, 23])
    def test_any_opset_computes_the_same(self, result, images, opset):
        model = jq.export(result.graph, result.plan, opset=opset)
        assert {o.domain: o.version for o in model.opset_import}[""] == opset
        np.testing.assert_array_equal(run(model, images[-8:]), run(result.model, images[-8:]))

    def test_what_cannot_be_is_an_error(self, result):
        with pytest.raises(jq.ConfigError, match=r"format needs one of .*got 'qdc'.*Did you mean 'qdq'"):
            jq.export(result.graph, result.plan, format="qdc")
        with pytest.raises(jq.ConfigError, match=r"opset 9: quantizers exist from 10 on"):
            jq.export(result.graph, result.plan, opset=9)
        with pytest.raises(jq.ConfigError, match=r"cannot be converted to opset 11|opset 11"):
            jq.export(result.graph, result.plan, opset=11)

    def test_other_weights_can_be_given(self, result, images):
        params = {"stem.weight": np.zeros_like(result.graph.params["stem.weight"])}
        model = jq.export(result.graph, result.plan, params=params)
        stored = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
        assert not stored["stem.weight_quantized"].any()


class TestAttributes:
    @pytest.mark.parametrize("size", [9, 10])
    @pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER", "VALID"])
    def test_auto_pad_is_counted_out(self, size, auto_pad):
        weights = {"w": np.ones((2, 1, 3, 3), np.float32)}
        nodes = [
            node("Conv", ["x", "w"], ["c"], auto_pad=auto_pad, strides=[2, 2]),
            node("AveragePool", ["c"], ["y"], kernel_shape=[2, 2], auto_pad=auto_pad),
        ]
        graph = explicit(jq.load(built(nodes, [1, 1, size, size], ["y"], weights)))
        assert all(n.attrs["auto_pad"] == "NOTSET" and len(n.attrs["pads"]) == 4 for n in graph.nodes)
        x = np.random.default_rng(0).standard_normal((1, 1, size, size), np.float32)
        original = ort.InferenceSession(built(nodes, [1, 1, size, size], ["y"], weights).SerializeToString())
        written = ort.InferenceSession(jq.to_model(graph).SerializeToString())
        np.testing.assert_array_equal(written.run(None, {"x": x})[0], original.run(None, {"x": x})[0])

    def test_onnxruntime_takes_them_at_every_opset(self, every_explicit):
        x, result = every_explicit
        for opset in range(13, 26):
            for format in ("qdq", "qoperator"):
                model = jq.export(result.graph, result.plan, opset=opset, format=format)
                session = ort.InferenceSession(model.SerializeToString())  # with all that it fuses by default
                want = onnxruntime_outputs(model, {"x": x[:1]})[0]
                assert np.abs(session.run(None, {"x": x[:1]})[0] - want).max() <= 2 * result.plan["y"].scale

    @pytest.mark.parametrize("opset", [20, 21, 25])
    def test_onnxruntime_takes_int8_that_is_moved_and_not_rounded(self, opset):
        """From opset 21 on it adds quantizers of its own behind what moves values, and refuses them."""
        x = np.random.default_rng(0).standard_normal((4, 2, 8, 8), np.float32)
        nodes = [
            node("Neg", ["x"], ["a"]),
            node("MaxPool", ["a"], ["m"], kernel_shape=[2, 2]),
            node("Relu", ["m"], ["r"]),
        ]
        nodes += [
            node("Transpose", ["r"], ["t"], perm=[0, 2, 3, 1]),
            node("Flatten", ["t"], ["f"]),
            node("Exp", ["f"], ["y"]),
        ]
        nodes += [node("Transpose", ["a"], ["z"], perm=[0, 2, 3, 1])]
        config = jq.presets["A8W8"].replace(op_types=None, exclude=("Transpose", "Flatten"))
        result = jq.quantize(built(nodes, [1, 2, 8, 8], ["y", "z"], opset=20), x, config, opset=opset)
        assert "t" not in result.plan and result.plan["r"].grid.signed
        found = ort.InferenceSession(result.model.SerializeToString()).run(None, {"x": x[:1]})
        for have, want in zip(found, onnxruntime_outputs(result.model, {"x": x[:1]}), strict=True):
            np.testing.assert_allclose(have, want, atol=float(result.plan["y"].scale), rtol=0)

    @pytest.mark.parametrize("dilation", [1, 2])
    def test_onnxruntime_takes_an_average_with_dilations(self, dilation):
        x = np.random.default_rng(0).standard_normal((4, 2, 8, 8), np.float32)
        pool = {"kernel_shape": [2, 3], "dilations": [dilation, dilation]}
        nodes = [node("Neg", ["x"], ["a"]), node("AveragePool", ["a"], ["p"], **pool), node("Neg", ["p"], ["y"])]
        config = jq.presets["INT8_CNN_DEFAULT"].replace(op_types=None)
        result = jq.quantize(built(nodes, [1, 2, 8, 8], ["y"], opset=19), x, config)
        assert "p" in result.plan
        session = ort.InferenceSession(result.model.SerializeToString())
        (want,) = onnxruntime_outputs(built(nodes, [1, 2, 8, 8], ["y"], opset=19), {"x": x[:1]})
        assert np.abs(session.run(None, {"x": x[:1]})[0] - want).max() <= 4 * result.plan["a"].scale
        have = jq.integer.load(result.model, target="ort")({"x": x[:1]})["y"]
        np.testing.assert_array_equal(have, onnxruntime_outputs(result.model, {"x": x[:1]})[0])

    def test_unknown_sizes_keep_same(self):
        nodes = [node("Conv", ["x", "w"], ["y"], auto_pad="SAME_UPPER")]
        graph = explicit(jq.load(built(nodes, [1, 1, "H", "W"], ["y"], {"w": np.ones((2, 1, 3, 3), np.float32)})))
        assert graph.nodes[0].attrs["auto_pad"] == "SAME_UPPER" and graph.nodes[0].attrs["kernel_shape"] == (3, 3)


def test_a_model_above_2_gb_has_its_weights_beside_it(tmp_path, monkeypatch, result, images):
    monkeypatch.setattr("jq.graph.write._LARGEST_PROTO", 100_000)
    path = tmp_path / "large.onnx"
    jq.export(result.graph, result.plan, path=path)
    assert {p.name for p in tmp_path.iterdir()} == {"large.onnx", "large.onnx.data"}
    found = ort.InferenceSession(path).run(None, {"input": images[-8:]})[0]
    np.testing.assert_allclose(found, run(result.model, images[-8:]), atol=float(result.plan["logits"].scale))


def test_opsets_keep_tensor_names():
    graph = jq.load(jq.zoo.path("fashion_resnet"))
    newer = with_opset(graph, 21)
    assert newer.producer.keys() == graph.producer.keys() and newer.params.keys() == graph.params.keys()
    assert with_opset(newer, None) is newer


def test_quantizing_outputs_that_are_read_too(images):
    """An output of the graph that a node reads as well: both get what was rounded."""
    nodes = [node("Relu", ["x"], ["a"]), node("Conv", ["a", "w"], ["b"])]
    model = built(nodes, ["N", 1, 4, 4], ["a", "b"], {"w": np.ones((1, 1, 1, 1), np.float32)})
    x = np.random.default_rng(0).standard_normal((8, 1, 4, 4), np.float32)
    graph = jq.prepare(jq.load(model), "XINT8")
    plan = jq.make_plan(graph, jq.calibrate(graph, x))
    quantized = quantized_graph(graph, plan)
    made = {o: n.op_type for n in quantized.nodes for o in n.outputs}
    assert made["b"] == "DequantizeLinear"
    session = ort.InferenceSession(jq.to_model(quantized).SerializeToString())
    ours = jq.fake_quant(graph)(graph.params, plan, {"x": x})
    for name, found in zip(("a", "b"), session.run(["a", "b"], {"x": x}), strict=True):
        np.testing.assert_array_equal(found, ours[name])


class TestPairs:
    """Which readers of a tensor have quantizers of their own; the numbers are the same."""

    def quantized(self, pairs, format="qdq", **options):
        config = jq.presets["XINT8"].replace(exclude=("conv2",), pairs=pairs, **options)
        data = np.random.default_rng(0).normal(size=(4, 3, 8, 8)).astype(np.float32)
        return jq.quantize(structures.residual(2), data, config, format=format).model, data

    def readers(self, model):
        """How many nodes read each dequantized activation of more than one reader, and what is dequantized twice."""
        stored = {i.name for i in model.graph.initializer}
        made = [n for n in model.graph.node if n.op_type == "DequantizeLinear" and n.input[0] not in stored]
        reads = Counter(i for n in model.graph.node for i in n.input)
        source = {n.output[0]: n.input[0] for n in model.graph.node if n.op_type == "QuantizeLinear"}
        copies = Counter(source[n.input[0]] for n in made)
        return [reads[n.output[0]] for n in made if reads[n.output[0]] > 1], [c for c in copies.values() if c > 1]

    def test_a_float_node_has_its_own(self):
        shared, data = self.quantized("shared")
        edges, _ = self.quantized("edges")
        each, _ = self.quantized("each")
        # Both blocks branch, and conv2, in the first of them, is float.
        assert [self.readers(m) for m in (shared, edges, each)] == [([2, 2], []), ([2], [2]), ([], [2, 2])]
        made = [onnxruntime_outputs(m, {"x": data[:1]})[0] for m in (shared, edges, each)]
        assert np.array_equal(made[0], made[1]) and np.array_equal(made[0], made[2])
        for model in (edges, each):
            graph, plan = jq.split_quantizers(jq.load(model))
            assert sorted(plan) == sorted(jq.split_quantizers(jq.load(shared))[1])
            assert self.readers(jq.export(graph, plan))[1] == []

    def test_quark_shares_them_unless_asked(self):
        assert self.readers(self.quantized("edges", strict_quark=True)[0])[1] == []
        assert self.readers(self.quantized("each", strict_quark=True)[0])[1] == [2, 2]

    def test_older_forms_share_them(self):
        assert self.readers(self.quantized("each", "qoperator")[0])[1] == []
        assert self.quantized("each", "fix_neuron")[0].graph.node
