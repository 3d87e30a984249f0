"""Quantized models taken apart and put together again; onnxruntime runs them both."""

from __future__ import annotations

import collections
import dataclasses
import functools

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import jq
from jq.arithmetic.formats import FLOAT16, INT4, INT8, INT32, UINT8
from jq.config import resolve
from jq.exchange.quantized import split_quantizers
from jq.plan import Plan, QParams
from tests.conftest import SHARED, onnxruntime_outputs

node = helper.make_node
PRESETS = ("XINT8", "A8W8", "A16W8", "U8U8_AAWA", "BF16", "FP16", "BFP16", "MXINT8", "UINT8_DYNAMIC_QUANT")
REFERENCES = (
    sorted(SHARED.glob("quark_reference/*.XINT8*.onnx"))
    + sorted(SHARED.glob("quark_reference/*.A8W8.onnx"))
    + sorted(SHARED.glob("ort_reference/*.onnx"))
    if SHARED
    else []
)


def described(plan):
    """A plan as values that can be compared."""

    def of(found):
        numbers = [np.asarray(v) for v in (found.scale, found.zero_point)]
        return found.grid, found.axis, found.dynamic, found.coded, *((n.shape, n.tolist()) for n in numbers)

    return {k: of(q) for k, q in plan.activations.items()}, {k: of(q) for k, q in plan.weights.items()}


def assert_same(one, other):
    """Equal graphs, to the bit, and equal plans."""
    (graph, plan), (again, replanned) = one, other
    assert described(plan) == described(replanned)
    assert (plan.nodes, plan.forms) == (replanned.nodes, replanned.forms)
    assert {k: (a.dtype, a.shape, a.tobytes()) for k, a in graph.arrays.items()} == {
        k: (a.dtype, a.shape, a.tobytes()) for k, a in again.arrays.items()
    }
    assert [(n.op_type, n.inputs, n.outputs) for n in graph.nodes] == [
        (n.op_type, n.inputs, n.outputs) for n in again.nodes
    ]
    assert [v.name for v in graph.inputs] == [v.name for v in again.inputs]
    assert [v.name for v in graph.outputs] == [v.name for v in again.outputs]


def quantizers(graph):
    """How many there are of each quantizer: its tensor, or its codes where they are constants, and its numbers."""
    found = collections.Counter()
    for n in graph.nodes:
        if not n.op_type.endswith("QuantizeLinear") and "DequantizeLinear" not in n.op_type:
            continue
        codes = graph.arrays.get(n.inputs[0])
        what = n.inputs[0] if n.op_type == "QuantizeLinear" else "" if codes is None else codes.tobytes()
        numbers = [graph.arrays.get(i, i) for i in n.inputs[1:]]
        found[n.op_type, what, *((str(a.dtype), str(np.squeeze(a).tolist())) for a in numbers)] += 1
    return found


def left(graph):
    """The quantizers that are still nodes."""
    return sorted(n.op_type for n in graph.nodes if "uantize" in n.op_type or n.op_type in ("Cast", "FixNeuron"))


def run(split, feeds):
    graph, plan = split
    found = jq.fake_quant(graph)(graph.params, plan, feeds)
    return [np.asarray(found[v.name]) for v in graph.outputs]


def exported(split, opset, **options):
    graph, plan = split
    return jq.export(graph, plan, params=graph.params, opset=opset, **options)


def checked(model, feeds, atol=0.0):
    """The split of a model, which computes what onnxruntime does, and comes back from its export."""
    loaded = jq.load(model)
    split = split_quantizers(loaded)
    expected = onnxruntime_outputs(model, feeds)
    for have, want in zip(run(split, feeds), expected, strict=True):
        np.testing.assert_allclose(have, want, rtol=0, atol=atol)
    back = exported(split, loaded.opset())
    for have, want in zip(onnxruntime_outputs(back, feeds), expected, strict=True):
        np.testing.assert_array_equal(have, want)
    assert_same(split_quantizers(jq.load(back)), split)
    return split


# ---------------------------------------------------------------------------------------------
# What export writes
# ---------------------------------------------------------------------------------------------


@functools.cache
def quantized(name, preset):
    config = resolve(preset)
    config = config.replace(method="minmax") if config.method == "percentile" else config  # is quicker
    graph = jq.prepare(jq.load(jq.zoo.path(name)), config)
    stats = jq.calibrate(graph, jq.zoo.calibration_set()[0][:16], config) if config.calibrates else None
    return graph, jq.make_plan(graph, stats, config)


@functools.cache
def written(name, preset, format="qdq", opset=None):
    return jq.export(*quantized(name, preset), format=format, opset=opset)


def grid_in_files(found):
    """A file does not say that a symmetric grid leaves out its lowest code."""
    return dataclasses.replace(found, grid=jq.arithmetic.formats.format_named(found.grid.name), coded=None)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", jq.zoo.models())
def test_an_export_comes_apart_and_is_written_again_to_the_byte(name, preset):
    graph, plan = quantized(name, preset)
    model = written(name, preset)
    split = found, again = split_quantizers(jq.load(model))
    expected = Plan(
        {k: grid_in_files(q) for k, q in plan.activations.items()},
        {k: _positive_axis(grid_in_files(q), graph.params[k].ndim) for k, q in plan.weights.items()},
        again.nodes,
    )
    assert described(again) == described(expected)
    assert found.params.keys() >= graph.params.keys()
    assert not left(found)
    back = exported(split, model.opset_import[0].version)
    assert back.SerializeToString() == model.SerializeToString()
    assert_same(split_quantizers(jq.load(back)), split)


def _positive_axis(found, rank):
    integers = isinstance(found.grid, jq.arithmetic.formats.Integer)
    return dataclasses.replace(found, axis=found.axis % rank) if integers and found.axis is not None else found


@pytest.mark.parametrize(
    ("name", "preset", "format", "opset"),
    [
        ("fashion_mobilenet", "XINT8", "vitis_qdq", None),
        ("fashion_mobilenet", "XINT8", "fix_neuron", None),
        ("fashion_resnet", jq.presets["XINT8"].replace(bias="int32"), "fix_neuron", None),
        ("fashion_mobilenet", "A8W8", "vitis_qdq", None),
        ("fashion_resnet", "A16W8", "vitis_qdq", 18),
        ("fashion_resnet", "A16W8", "qdq", 21),
        ("fashion_resnet", "XINT8", "qdq", 19),
        ("fashion_mobilenet", jq.presets["A8W8"].replace(per_channel=True), "qdq", 17),
    ],
)
def test_other_formats_and_opsets_give_the_same_plan_and_come_back_to_the_byte(name, preset, format, opset):
    model = written(name, preset, format, opset)
    split = split_quantizers(jq.load(model))
    assert not left(split[0])
    assert described(split[1]) == described(split_quantizers(jq.load(written(name, preset)))[1])
    back = exported(split, model.opset_import[0].version, format=format)
    assert back.SerializeToString() == model.SerializeToString()


@pytest.mark.parametrize(
    ("name", "preset", "steps"),
    [
        ("fashion_resnet", "XINT8", 0),
        ("fashion_mobilenet", "XINT8", 0),
        ("fashion_mobilenet", "A8W8", 1),
        ("fashion_resnet", "U8U8_AAWA", 1),
        ("fashion_resnet", "A16W8", 4),  # float32 sums of 16-bit products depend on their order by themselves
        ("fashion_resnet", "BF16", 0.05),
        pytest.param("fashion_resnet", "FP16", 0.05, marks=pytest.mark.slow),
        pytest.param("fashion_resnet", "BFP16", None, marks=pytest.mark.slow),
        ("fashion_resnet", "MXINT8", None),
        ("fashion_mobilenet", "UINT8_DYNAMIC_QUANT", 0.3),  # a code that differs may move the next scale
    ],
)
def test_the_float_graph_with_its_plan_computes_what_the_file_does(name, preset, steps, rng):
    model = written(name, preset)
    loaded = jq.load(model)
    split = split_quantizers(loaded)
    feeds = {"input": (rng.standard_normal((4, 1, 28, 28)) * 2).astype(np.float32)}
    (have,) = run(split, feeds)
    if preset != "BF16":  # XLA drops the rounding of Cast to bfloat16 and back in front of a mean
        np.testing.assert_array_equal(have, jq.trace(loaded)(loaded.params, feeds)["logits"])
    if steps is not None:  # onnxruntime has no block formats
        step = split[1]["logits"].scale if "logits" in split[1] else 1
        (want,) = onnxruntime_outputs(model, feeds)
        np.testing.assert_allclose(have, want, rtol=0, atol=1.001 * steps * step)


def test_what_an_export_wrote_out_for_the_npu_is_not_applied_again():
    graph, plan = split_quantizers(jq.load(written("fashion_resnet", "XINT8")))
    assert plan.forms == ()
    assert graph.producer["pool.mean"].inputs == ("pool.mean_Mul", "pool.mean_Scale")
    assert "pool.mean" in plan and "pool.mean_Mul" not in plan
    assert plan.nodes >= {"pool.mean", "logits"}


def test_codes_that_were_made_at_another_scale_stay():
    graph, plan = quantized("fashion_resnet", "XINT8")
    moved = {k: dataclasses.replace(plan[k], coded=plan[k].scale * np.float32(4)) for k in ("stem.weight", "stem.bias")}
    model = jq.export(graph, plan.replace(moved))
    split = found, again = split_quantizers(jq.load(model))
    assert again["stem.weight"].coded is None
    codes = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}["stem.weight_quantized"]
    np.testing.assert_array_equal(found.params["stem.weight"], codes * plan["stem.weight"].scale)
    assert exported(split, 17).SerializeToString() == model.SerializeToString()


# ---------------------------------------------------------------------------------------------
# What others write
# ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(not REFERENCES, reason="the shared folder with Quark's and onnxruntime's own models is absent")
@pytest.mark.parametrize("path", REFERENCES, ids=lambda p: p.name)
def test_reference_models_keep_quantizers_codes_and_results(path, rng):
    model, loaded = onnx.load(path), jq.load(path)
    split = graph, plan = split_quantizers(loaded)
    shapes = {v.name: [d if isinstance(d, int) else 1 for d in v.shape] for v in loaded.inputs}
    feeds = {k: (rng.standard_normal(shape) * 1.5).astype(np.float32) for k, shape in shapes.items()}
    expected = onnxruntime_outputs(model, feeds)
    steps = 0.0 if "XINT8" in path.name else 1.001
    for value, have, want in zip(graph.outputs, run(split, feeds), expected, strict=True):
        bound = steps * float(plan[value.name].scale) if value.name in plan else 1e-6
        np.testing.assert_allclose(have, want, rtol=0 if value.name in plan else 1e-6, atol=bound, err_msg=value.name)
    back = exported(split, loaded.opset())
    for have, want in zip(onnxruntime_outputs(back, feeds), expected, strict=True):
        np.testing.assert_array_equal(have, want)
    assert_same(split_quantizers(jq.load(back)), split)
    assert quantizers(jq.load(back)) == quantizers(loaded)


@pytest.mark.skipif(not REFERENCES, reason="the shared folder with Quark's and onnxruntime's own models is absent")
@pytest.mark.parametrize("path", [p for p in REFERENCES if "qoperator" not in p.name], ids=lambda p: p.name)
def test_reference_models_get_the_names_of_their_float_models(path):
    graph, plan = split_quantizers(jq.load(path))
    original = jq.load(SHARED / "quark_reference" / f"{path.name.split('.')[0]}.onnx")
    made = {k for k in plan if "bn_" in k or k.startswith("_inlfunc")}  # by rewrites before quantizing
    assert set(plan) - made <= original.tensors
    # Biases of tiny scales: no float32 product of code and scale has their int32 codes.
    stay = [n.outputs[0] for n in graph.nodes if "uantize" in n.op_type]
    assert stay == {"ref": ["t_b"], "t_smallw": ["b"]}.get(path.name.split(".")[0], []) * ("XINT8" not in path.name)
    assert not any("uantize" in n.op_type for n in graph.nodes if n.op_type != "DequantizeLinear")


# ---------------------------------------------------------------------------------------------
# Small graphs
# ---------------------------------------------------------------------------------------------


def built(nodes, outputs, opset=21, inputs=(("x", TensorProto.FLOAT, (2, 4)),), **arrays):
    """A model of these nodes, with such of the usual parameters as they read."""
    arrays = {k: v for k, v in PARAMETERS.items() if any(f'"{k}"' in str(n) for n in nodes)} | arrays
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(*i) for i in inputs],
        [onnx.ValueInfoProto(name=o) for o in outputs],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in arrays.items()],
    )
    domains = {n.domain for n in nodes} - {""}
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in sorted(domains))]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


PARAMETERS = {
    "s": np.float32(0.25),
    "z": np.int8(3),
    "s2": np.float32(0.5),
    "z2": np.uint8(128),
    "w": np.float32([[1, -2, 3, 0.5]] * 4),
}
FEEDS = {"x": np.float32([[-40, -0.9, 0.3, 0.6], [1.26, 5, 31.2, 99]])}


def q(source, codes, scale="s", zero="z", **attrs):
    return node("QuantizeLinear", [source, scale, *([zero] if zero else [])], [codes], **attrs)


def dq(codes, result, scale="s", zero="z", **attrs):
    return node("DequantizeLinear", [codes, scale, *([zero] if zero else [])], [result], **attrs)


def op(op_type, inputs, outputs, **attrs):
    return node(op_type, inputs.split(), outputs.split(), **attrs)


def relu(source, result):
    return node("Relu", [source], [result])


PAIR = ["DequantizeLinear", "QuantizeLinear"]
EIGHT = np.int8([-8, 0, 3, 7])
ODD = {
    # name: (nodes, outputs, quantized tensors, quantizers that stay, arrays)
    "for all readers": ([q("x", "c"), dq("c", "d"), relu("d", "y"), op("Neg", "d", "y2")], "y y2", "x", []),
    "for some readers": ([q("x", "c"), dq("c", "d"), relu("d", "y"), op("Neg", "x", "y2")], "y y2", "", PAIR),
    "of an output too": ([relu("x", "r"), q("r", "c"), dq("c", "d"), relu("d", "y")], "y r", "", PAIR),
    "of the outputs": ([relu("x", "y_in"), q("y_in", "c"), dq("c", "y"), op("Neg", "y", "y2")], "y y2", "y", []),
    "two outputs": ([relu("x", "r"), q("r", "c"), dq("c", "y"), dq("c", "y2")], "y y2", "", ["DequantizeLinear", *PAIR]),
    "from input to output": ([q("x", "c"), dq("c", "y")], "y", "", PAIR),
    "only quantize": ([q("x", "y")], "y", "", ["QuantizeLinear"]),
    "codes are seen": ([q("x", "c"), dq("c", "d"), relu("d", "y"), op("Neg", "c", "y2")], "y y2", "", PAIR),
    "codes are an output": ([q("x", "c"), dq("c", "d"), relu("d", "y")], "y c", "", PAIR),
    "one per reader": (
        [q("x", "c"), dq("c", "d"), relu("d", "y"), q("x", "c2"), dq("c2", "d2"), dq("c2", "d3"), op("Add", "d2 d3", "y2")],
        "y y2", "x", [],
    ),
    "of two scales": (
        [q("x", "c"), dq("c", "d"), relu("d", "y"), q("x", "c2", "s2", "z2"), dq("c2", "d2", "s2", "z2"), relu("d2", "y2")],
        "y y2", "", PAIR[:1] * 2 + PAIR[1:] * 2,
    ),
    "back with another scale": ([q("x", "c"), dq("c", "d", "s2"), relu("d", "y")], "y", "", PAIR),
    "two in a row": (
        [q("x", "c"), dq("c", "d"), q("d", "c2", "s2", "z2"), dq("c2", "d2", "s2", "z2"), relu("d2", "y")],
        "y", "x", PAIR,
    ),
    "the same twice in a row": ([q("x", "c"), dq("c", "d"), q("d", "c2"), dq("c2", "d2"), relu("d2", "y")], "y", "x", PAIR),
    "two in a row, one of them of some": (
        [q("x", "c"), dq("c", "d"), q("d", "c2", "s2", "z2"), dq("c2", "d2", "s2", "z2"), relu("d2", "y"), relu("x", "y2")],
        "y y2", "d", PAIR,
    ),
    "computed scale": ([op("Mul", "s s2", "m"), q("x", "c", "m"), dq("c", "d", "m"), relu("d", "y")], "y", "", PAIR),
    "no zero point": ([q("x", "c", zero=""), dq("c", "d", zero=""), relu("d", "y")], "y", "x", []),
    "channels of an activation": (
        [q("x", "c", "v", "vz", axis=1), dq("c", "d", "v", "vz", axis=1), relu("d", "y")],
        "y", "", PAIR, {"v": np.float32([1, 2, 4, 8]), "vz": np.zeros(4, np.int8)},
    ),
    "float weight": ([q("w", "c"), dq("c", "d"), op("MatMul", "x d", "y")], "y", "w", []),
    "float weight, by channels": (
        [q("w", "c", "v", "vz", axis=-1), dq("c", "d", "v", "vz", axis=-1), op("MatMul", "x d", "y")],
        "y", "w", [], {"v": np.float32([1, 2, 4, 8]), "vz": np.int8([0, 1, 2, 3])},
    ),
    "weight": ([dq("w_quantized", "d"), op("MatMul", "x d", "y")], "y", "w", [],
        {"w_quantized": np.int8([[-128, 1, 2, 127]] * 4)}),
    "weight of 4 bits": ([dq("k", "d", "s2", ""), op("Add", "x d", "y")], "y", "d", [],
        {"k": np.array([-8, 0, 3, 7]).astype(INT4.dtype)}),
    "weight by one channel": ([dq("k_quantized", "d", "v", "vz", axis=0), op("Add", "x d", "y")], "y", "k", [],
        {"k_quantized": np.int8([[-8, 0, 3, 7]]), "v": np.float32([2]), "vz": np.int8([1])}),
    "weight by blocks": ([dq("k", "d", "v", "vz", axis=1, block_size=2), op("Add", "x d", "y")], "y", "", PAIR[:1],
        {"k": np.int8([[-8, 0, 3, 7]]), "v": np.float32([[2, 4]]), "vz": np.int8([[1, 2]])}),
    "codes of two scales": ([dq("k_quantized", "a"), dq("k_quantized", "b", "s2"), op("Add", "a b", "k2"), op("Add", "x k2", "y")],
        "y", "b k", [], {"k_quantized": EIGHT}),
    "weight read twice": ([dq("k_quantized", "a"), dq("k_quantized", "b"), op("Add", "a x", "t"), op("Add", "t b", "y")],
        "y", "k", [], {"k_quantized": EIGHT}),
    "weight is an output": ([dq("k", "y"), op("Add", "x y", "y2")], "y y2", "", PAIR[:1], {"k": EIGHT}),
    "weight quantized twice": ([dq("k_quantized", "d"), q("d", "c", "s2", "z2"), dq("c", "e", "s2", "z2"), op("Add", "x e", "y")],
        "y", "k", PAIR, {"k_quantized": EIGHT}),
    "32 bits that float32 holds": ([dq("b_quantized", "b", "s", "i"), op("Add", "x b", "y")], "y", "b", [],
        {"b_quantized": np.int32([-(2**22), 0, 2**20 + 1, 7]), "i": np.int32(0)}),
    "32 bits that float32 does not hold": ([dq("b_quantized", "b", "s", "i"), op("Add", "x b", "y")], "y", "", PAIR[:1],
        {"b_quantized": np.int32([-8, 0, 2**24 + 1, 7]), "i": np.int32(0)}),
    "scale of zero": ([dq("k", "d", "o"), op("Add", "x d", "y")], "y", "", PAIR[:1],
        {"k": np.int8([0] * 4), "o": np.float32(0)}),
    "integer product": (
        [op("DynamicQuantizeLinear", "x", "c cs cz"), op("MatMulInteger", "c k cz", "i"),
         op("Cast", "i", "f", to=TensorProto.FLOAT), op("Mul", "f cs", "y")],
        "y", "", ["Cast", "DynamicQuantizeLinear"], {"k": np.int8(np.eye(4))},
    ),
    "dynamic": ([op("DynamicQuantizeLinear", "x", "c cs cz"), dq("c", "d", "cs", "cz"), relu("d", "y")], "y", "x", []),
    "dynamic, and its scale is seen": (
        [op("DynamicQuantizeLinear", "x", "c cs cz"), dq("c", "d", "cs", "cz"), op("Mul", "d cs", "y")],
        "y", "", ["DequantizeLinear", "DynamicQuantizeLinear"],
    ),
    "QLinearMatMul": (
        [q("x", "c"), op("QLinearMatMul", "c s z k s z s2 z", "e"), dq("e", "y", "s2")],
        "y", "", PAIR, {"k": np.int8(np.eye(4) * 9)},
    ),
    "bfloat16": (
        [op("Cast", "x", "c", to=TensorProto.BFLOAT16), op("Cast", "c", "d", to=TensorProto.FLOAT), relu("d", "y")],
        "y", "x", [],
    ),
    "bfloat16 of integers": (
        [op("Cast", "x", "n", to=TensorProto.INT32), op("Cast", "n", "c", to=TensorProto.BFLOAT16),
         op("Cast", "c", "d", to=TensorProto.FLOAT), relu("d", "y")],
        "y", "", ["Cast"] * 3,
    ),
    "float16 with infinity": (
        [op("Cast", "x", "c", to=TensorProto.FLOAT16), op("Cast", "c", "d", to=TensorProto.FLOAT), relu("d", "y")],
        "y", "", ["Cast"] * 2,
    ),
    "float16 that saturates": (
        [op("Clip", "x lo hi", "b"), op("Cast", "b", "c", to=TensorProto.FLOAT16),
         op("Cast", "c", "d", to=TensorProto.FLOAT), relu("d", "y")],
        "y", "x", [], {"lo": np.float32(-FLOAT16.largest), "hi": np.float32(FLOAT16.largest)},
    ),
    "float16 weight": ([op("Cast", "w_quantized", "d", to=TensorProto.FLOAT), op("MatMul", "x d", "y")], "y", "w", [],
        {"w_quantized": np.float16(np.eye(4) / 3)}),
    "scales of another type": (
        [op("Cast", "x", "h", to=TensorProto.FLOAT16), q("h", "c", "hs"), dq("c", "d", "hs"),
         op("Cast", "d", "y", to=TensorProto.FLOAT)],
        "y", "", ["Cast"] * 2 + PAIR, {"hs": np.float16(0.25)},
    ),
    "a shape": (
        [dq("k", "d", zero=""), op("Cast", "d", "n", to=TensorProto.INT64), op("Reshape", "x n", "y")],
        "y", "", ["Cast", "DequantizeLinear"], {"k": np.uint8([16, 8])},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_what_a_plan_cannot_say_stays_and_stays_right(case):
    if case == "scales of another type" and tuple(map(int, ort.__version__.split(".")[:2])) < (1, 31):
        pytest.skip("older onnxruntime divides in float16, where ties fall otherwise")
    nodes, outputs, planned, stays, *arrays = ODD[case]
    graph, plan = checked(built(nodes, outputs.split(), **dict(*arrays)), FEEDS)
    assert set(plan) == {*planned.split()}
    assert left(graph) == sorted(stays)


def test_codes_as_inputs_of_the_graph_stay():
    model = built([dq("x", "d"), relu("d", "y")], ["y"], inputs=[("x", TensorProto.INT8, (4,))])
    graph, plan = checked(model, {"x": np.int8([-128, 0, 5, 127])})
    assert left(graph) == ["DequantizeLinear"] and not len(plan)


def test_grids_are_those_of_the_file():
    model = built([q("x", "c"), dq("c", "d"), dq("k", "e", "v", "i", axis=0), node("Add", ["d", "e"], ["y"])], ["y"],
        k=np.int32([1, 2, 3, 2**20]), v=np.float32([1, 2, 0.3, 4]), i=np.zeros(4, np.int32))  # fmt: skip
    graph, plan = checked(model, FEEDS)
    assert (plan["x"].grid, plan["x"].zero_point, plan["x"].axis) == (INT8, 3, None)
    assert (plan["e"].grid, plan["e"].axis) == (INT32, 0)
    assert graph.params["e"].tolist() == [1, 4, np.float32(0.3) * 3, 2**22]


def test_subgraphs_read_what_the_graph_around_them_has():
    """Tensors that a branch captures are renamed in it; quantizers inside it stay."""
    then = helper.make_graph([node("Neg", ["d"], ["t"])], "then", [], [onnx.ValueInfoProto(name="t")])
    other = helper.make_graph(
        [q("d", "ec"), dq("ec", "e"), node("Abs", ["e"], ["u"])], "else", [], [onnx.ValueInfoProto(name="u")]
    )
    nodes = [
        node("ReduceMax", ["x"], ["top"], keepdims=0),
        q("r", "c", "s2", "z2"),
        dq("c", "d", "s2", "z2"),
        node("Less", ["top", "s"], ["small"]),
        node("If", ["small"], ["y"], then_branch=then, else_branch=other),
    ]
    model = built([relu("x", "r"), *nodes], ["y"])
    for sign in (1, -1):
        graph, plan = checked(model, {"x": sign * np.abs(FEEDS["x"])})
        assert set(plan) == {"r"}
        assert sorted(n.op_type for n in graph.walk() if "uantize" in n.op_type) == PAIR


@pytest.mark.parametrize("kind", ["BFPQuantizeDequantize", "MXQuantizeDequantize"])
def test_block_formats_of_any_attributes_come_back(kind):
    """Quark's library says what attributes that are missing mean; a single element it leaves alone."""
    block = node(kind, ["x"], ["d"], domain="com.amd.quark", block_size=4)
    single = node(kind, ["m"], ["e"], domain="com.amd.quark")
    nodes = [block, relu("d", "r"), node("ReduceMax", ["r"], ["m"], keepdims=1), single, node("Add", ["r", "e"], ["y"])]
    loaded = jq.load(built(nodes, ["y"]))
    split = graph, plan = split_quantizers(loaded)
    assert (set(plan), plan["x"].axis, plan["x"].grid.size) == ({"x"}, 1, 4)
    assert [n.op_type for n in graph.nodes if n.domain] == [kind]
    np.testing.assert_array_equal(run(split, FEEDS)[0], jq.trace(loaded)(loaded.params, FEEDS)["y"])
    assert_same(split_quantizers(jq.load(exported(split, 21))), split)


def test_quantizers_of_quarks_own_domain_are_read():
    def pair(source, result, scale, zero):
        yield node("ExtendedQuantizeLinear", [source, scale, zero], [f"{result}_c"], domain="com.amd.quark")
        yield node("ExtendedDequantizeLinear", [f"{result}_c", scale, zero], [result], domain="com.amd.quark")

    nodes = [*pair("x", "d", "one", "bf"), relu("d", "r"), *pair("r", "e", "s2", "z2"), relu("e", "t")]
    nodes += [*pair("t", "f", "s2", "bf"), relu("f", "y")]
    arrays = {"one": np.float32(1), "bf": np.zeros((), jq.arithmetic.formats.BFLOAT16.dtype)}
    loaded = jq.load(built(nodes, ["y"], **arrays))
    split = graph, plan = split_quantizers(loaded)
    assert {k: plan[k].grid for k in plan} == {"x": jq.arithmetic.formats.BFLOAT16, "r": UINT8}
    assert len(left(graph)) == 2  # a float with a scale
    np.testing.assert_array_equal(run(split, FEEDS)[0], jq.trace(loaded)(loaded.params, FEEDS)["y"])


def random_model(rng):
    """A graph of exact operators with quantizers put in at random: shared, in a row, partial, of outputs."""
    tensors, codes, nodes, arrays, outputs = ["x", "a"], [], [], {"a": np.float32(rng.integers(-99, 99, 4) / 8)}, []
    for index in range(int(rng.integers(4, 14))):
        name, scale = f"t{index}", f"s{rng.integers(3)}"
        arrays[scale] = np.float32(2.0 ** -int(scale[1:]))
        source = tensors[-1] if index and rng.random() < 0.6 else str(rng.choice(tensors))
        match int(rng.integers(6)):
            case 0:
                nodes.append(node(str(rng.choice(["Relu", "Neg", "Abs"])), [source], [name]))
            case 1:
                nodes.append(node("Add", [source, str(rng.choice(tensors))], [name]))
            case 2 if codes:
                made, scale = codes[int(rng.integers(len(codes)))]
                nodes.append(dq(made, name, scale if rng.random() < 0.8 else "s"))
            case 3:
                arrays[f"k{index}"] = rng.integers(-128, 128, 4).astype(np.int8)
                nodes += [dq(f"k{index}", f"d{index}", scale), node("Add", [source, f"d{index}"], [name])]
            case _:
                nodes += [q(source, f"c{index}", scale), dq(f"c{index}", name, scale)]
                codes.append((f"c{index}", scale))
        tensors.append(name)
        if rng.random() < 0.2:
            outputs.append(name)
    return built(nodes, list(dict.fromkeys([*outputs, tensors[-1]])), **arrays)


@pytest.mark.parametrize("seed", range(30))
def test_graphs_of_random_quantizers(seed):
    checked(random_model(np.random.default_rng(seed)), FEEDS)


def test_a_graph_without_quantizers_stays_as_it_is():
    loaded = jq.load(jq.zoo.path("fashion_resnet"))
    graph, plan = split_quantizers(loaded)
    assert not len(plan) and not plan.nodes
    assert graph.nodes == loaded.nodes and graph.arrays.keys() == loaded.arrays.keys()


def test_a_plan_from_a_file_goes_where_other_plans_do():
    graph, plan = split_quantizers(jq.load(written("fashion_resnet", "XINT8")))
    finer = plan.replace({"logits": QParams(np.float32(2.0**-10), np.int32(0), jq.arithmetic.formats.INT16)})
    images = {"input": jq.zoo.calibration_set()[0][:4]}
    fn = jq.fake_quant(graph)
    coarse, fine = (np.asarray(fn(graph.params, p, images)["logits"]) for p in (plan, finer))
    assert 0 < np.abs(coarse - fine).max() <= plan["logits"].scale
