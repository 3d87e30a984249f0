"""Shape, sequence, text and vision operators: what the ONNX suite does not cover."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from jq.errors import ModelError
from jq.graph.read import load
from jq.graph.write import to_model
from jq.readings.tracing import trace
from tests.conftest import one_node, onnxruntime_outputs, outputs

INT_MIN = np.iinfo(np.int64).min


def run(model: onnx.ModelProto, inputs: Mapping[str, Any]) -> list[Any]:
    fn = trace(load(model))
    outputs = fn(fn.graph.params, inputs)
    return [jax.tree.map(np.asarray, outputs[name]) for name in fn.outputs]


def primitives(model: onnx.ModelProto, inputs: Mapping[str, Any]) -> Counter[str]:
    """How often each operation stands in the jaxpr, inner ones included."""
    fn = trace(load(model))

    def count(jaxpr: Any) -> Counter[str]:
        found: Counter[str] = Counter()
        for equation in jaxpr.eqns:
            inner = [p.jaxpr for p in equation.params.values() if hasattr(p, "jaxpr")]
            found += sum(map(count, inner), Counter()) if inner else Counter([equation.primitive.name])
        return found

    return count(jax.make_jaxpr(fn)(fn.graph.params, dict(inputs)).jaxpr)


def against_onnxruntime(model: onnx.ModelProto, inputs: Mapping[str, Any], atol: float = 1e-5) -> None:
    wanted = onnxruntime_outputs(model, inputs)
    found = run(model, inputs)
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol)


def graph(
    nodes: Sequence[tuple[str, Sequence[str], Sequence[str], dict[str, Any]]],
    x: np.ndarray | None,
    arrays: Mapping[str, np.ndarray],
    opset: int = 17,
) -> onnx.ModelProto:
    """A model from x to y."""
    made = [helper.make_node(op, inputs, outputs, **attrs) for op, inputs, outputs, attrs in nodes]
    kind = TensorProto.STRING if x is not None and x.dtype == object else TensorProto.FLOAT
    inputs = [] if x is None else [helper.make_tensor_value_info("x", kind, x.shape)]
    initializers = [numpy_helper.from_array(v, k) for k, v in arrays.items()]
    proto = helper.make_graph(made, "g", inputs, [onnx.ValueInfoProto(name="y")], initializers)
    return helper.make_model(proto, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


# ---------------------------------------------------------------------------------------------
# Shape arithmetic
# ---------------------------------------------------------------------------------------------


def test_shape_arithmetic_leaves_no_operation(rng: np.random.Generator) -> None:
    """What PyTorch writes for x.view(x.size(0), -1, 4)[:, ::1], and for torch.arange(x.size(1))."""
    x = rng.random((2, 6, 8), np.float32)
    arrays = {"zero": np.array(0), "one": np.array(1), "axes": np.array([0]), "rest": np.array([-1, 4])}
    nodes = [
        ("Shape", ["x"], ["s"], {}),
        ("Gather", ["s", "zero"], ["n"], {"axis": 0}),
        ("Unsqueeze", ["n", "axes"], ["n1"], {}),
        ("Concat", ["n1", "rest"], ["shape"], {"axis": 0}),
        ("Reshape", ["x", "shape"], ["r"], {}),
        ("Gather", ["s", "one"], ["c"], {"axis": 0}),
        ("Range", ["zero", "c", "one"], ["range"], {}),
        ("Unsqueeze", ["c", "axes"], ["c1"], {}),
        ("Slice", ["range", "axes", "c1"], ["part"], {}),
        ("Squeeze", ["n1", "axes"], ["n0"], {}),
        ("Expand", ["n0", "c1"], ["ends"], {}),
        ("ScatterND", ["ends", "axes2", "axes"], ["ends2"], {}),
        ("Gather", ["r", "part"], ["y"], {"axis": 1}),
    ]
    model = graph(nodes, x, arrays | {"axes2": np.array([[0]])})
    assert primitives(model, {"x": x}) == {"reshape": 1, "slice": 1}
    against_onnxruntime(model, {"x": x})


def test_a_shape_may_be_an_input_outside_of_jit(rng: np.random.Generator) -> None:
    x, shape = rng.random((2, 6), np.float32), np.array([3, -1])
    model = one_node("Reshape", {"x": x, "shape": shape})
    np.testing.assert_array_equal(run(model, {"x": x, "shape": shape})[0], x.reshape(3, 4))


def test_what_cannot_be_is_told(rng: np.random.Generator) -> None:
    x = rng.random((4, 3), np.float32)
    with pytest.raises(ModelError, match="K is 5, but axis 1 has 3 elements"):
        run(one_node("TopK", {"x": x}, ("v", "i"), initializers={"k": np.array([5])}, axis=1), {"x": x})
    with pytest.raises(ModelError, match="outside axis 0"):
        run(one_node("Gather", {"x": x}, initializers={"i": np.array([4])}), {"x": x})
    with pytest.raises(ModelError, match="cannot split 4"):
        run(one_node("Split", {"x": x}, ("a", "b"), initializers={"s": np.array([1, 2])}), {"x": x})
    blocks = {"x": np.ones((4, 3), np.uint8), "scale": np.ones((2, 3), np.float32)}
    with pytest.raises(ModelError, match="fits no blocks of"):
        run(one_node("DequantizeLinear", blocks, axis=0, block_size=2**63 - 1), blocks)
    narrow = {"x": np.ones((3, 4), ml_dtypes.float4_e2m1fn)}
    with pytest.raises(ModelError, match="takes no float4_e2m1fn"):  # XLA ends the process over their sum
        run(one_node("Einsum", narrow, opset=23, equation="ij->i"), narrow)


def test_grams_that_may_skip_any_number_of_items() -> None:
    x = np.int64([2, 3, 5, 4, 2])
    attrs = {
        "max_gram_length": 2,
        "min_gram_length": 2,
        "mode": "TF",
        "ngram_counts": [0, 1],
        "ngram_indexes": [0, 1, 2],
    }
    model = one_node("TfIdfVectorizer", {"x": x}, max_skip_count=2**31 - 1, pool_int64s=[9, 2, 4, 3, 2], **attrs)
    assert np.asarray(outputs(model, {"x": x})[0]).tolist() == [0, 1, 1]


# ---------------------------------------------------------------------------------------------
# Indexing
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("op", "indices", "attrs"),
    [
        ("Gather", [-1, 0, -3], {"axis": 1}),
        ("Gather", -2, {"axis": 1}),
        ("Gather", [0, 2], {"axis": 1}),
        ("GatherElements", [[[-1], [1]]], {"axis": 0}),
        ("GatherND", [[[-1, 0], [1, -2]]], {"batch_dims": 0}),
        ("GatherND", [[[-1, 0], [1, -2]], [[0, 3], [2, 1]]], {"batch_dims": 1}),
    ],
)
def test_gather_counts_from_the_end(op: str, indices: Any, attrs: Any, known: bool, rng: np.random.Generator) -> None:
    x, i = rng.random((2, 3, 4), np.float32), np.array(indices)
    inputs = {"x": x} if known else {"x": x, "i": i}
    against_onnxruntime(one_node(op, inputs, initializers={} if not known else {"i": i}, **attrs), inputs)


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
def test_scatter_counts_from_the_end(reduction: str, rng: np.random.Generator) -> None:
    x, u = rng.random((4, 3), np.float32), rng.random((2, 2), np.float32)
    inputs = {"x": x, "i": np.array([[-1, 0], [2, -2]]), "u": u}
    against_onnxruntime(one_node("ScatterElements", inputs, opset=18, reduction=reduction), inputs)
    inputs = {"x": x, "i": np.array([[-1], [0]]), "u": rng.random((2, 3), np.float32)}
    against_onnxruntime(one_node("ScatterND", inputs, opset=18, reduction=reduction), inputs)


@pytest.mark.parametrize(("opset", "kind"), [(9, np.float32), (10, np.float32), (11, np.int32), (11, np.float32)])
@pytest.mark.parametrize("axis", [0, -1])
def test_top_k_of_every_opset(opset: int, kind: Any, axis: int, rng: np.random.Generator) -> None:
    x = rng.integers(-3, 3, (5, 7)).astype(kind)
    x[0, 0] = np.iinfo(np.int32).min
    attrs = {"axis": axis} | ({"largest": 0} if opset > 10 else {}) | ({"k": 4} if opset < 10 else {})
    arrays = {} if opset < 10 else {"k": np.array([4])}
    against_onnxruntime(one_node("TopK", {"x": x}, ("v", "i"), opset=opset, initializers=arrays, **attrs), {"x": x})


@pytest.mark.parametrize(
    ("starts", "ends", "axes", "steps"),
    [
        ([-1], [INT_MIN], [1], [-1]),
        ([7, 0], [1, 9], [2, 0], [-3, 2]),
        ([-100, 2], [100, -1], [-1, 1], [1, 1]),
        ([3], [3], [1], [1]),
    ],
)
def test_slice_clamps(starts: Any, ends: Any, axes: Any, steps: Any, rng: np.random.Generator) -> None:
    x = rng.random((3, 5, 9), np.float32)
    arrays = {"s": np.array(starts), "e": np.array(ends), "a": np.array(axes), "t": np.array(steps)}
    against_onnxruntime(one_node("Slice", {"x": x}, initializers=arrays), {"x": x})
    if min(steps) == 1:
        against_onnxruntime(one_node("Slice", {"x": x}, opset=9, starts=starts, ends=ends, axes=axes), {"x": x})


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge", "wrap"])
def test_pads_may_be_negative(mode: str, rng: np.random.Generator) -> None:
    x = rng.random((2, 6, 7), np.float32)
    arrays = {"pads": np.array([-1, 2, 3, -2]), "value": np.array(2.5, np.float32), "axes": np.array([-1, 1])}
    against_onnxruntime(one_node("Pad", {"x": x}, initializers=arrays, opset=19, mode=mode), {"x": x})


def test_one_hot_and_range_of_every_type() -> None:
    for kind in (np.float32, np.int32, np.int64):
        inputs = {"i": np.array([[1, -1], [3, 9]], kind)}
        arrays = {"depth": np.array(4, kind), "values": np.array([2, 5], np.float32)}
        against_onnxruntime(one_node("OneHot", inputs, initializers=arrays, axis=1), inputs)
    for start, limit, step in ((1, 10, 3), (10, 1, -4), (1, 1, 1), (3, 1, 1)):
        for kind in (np.float32, np.int32, np.int64):
            arrays = {k: np.array(v, kind) for k, v in zip("abc", (start, limit, step), strict=True)}
            assert run(one_node("Range", {}, initializers=arrays), {})[0].tolist() == list(range(start, limit, step))


# ---------------------------------------------------------------------------------------------
# Channels last
# ---------------------------------------------------------------------------------------------

BETWEEN: dict[str, tuple[list[Any], int]] = {
    "Concat": ([("Concat", ["a", "a"], ["b"], {"axis": 1})], 8),
    "Concat, spatial": ([("Concat", ["a", "a"], ["b"], {"axis": -1})], 4),
    "Split": ([("Split", ["a"], ["b", "c"], {"axis": 1})], 2),
    "Slice": ([("Slice", ["a", "starts", "ends", "axes", "steps"], ["b"], {})], 2),
    "Pad": ([("Pad", ["a", "pads"], ["b"], {"mode": "reflect"})], 4),
    "Pad, attribute-less value": ([("Pad", ["a", "pads"], ["b"], {})], 4),
    "Resize": ([("Resize", ["a", "", "twice"], ["b"], {"mode": "linear"})], 4),
    "Resize, nearest": ([("Resize", ["a", "", "twice"], ["b"], {"mode": "nearest"})], 4),
    "Resize, down": ([("Resize", ["a", "", "", "sizes"], ["b"], {"mode": "cubic"})], 4),
    "DepthToSpace": ([("DepthToSpace", ["a"], ["b"], {"blocksize": 2, "mode": "CRD"})], 1),
    "SpaceToDepth": ([("SpaceToDepth", ["a"], ["b"], {"blocksize": 2})], 16),
    "TopK": ([("TopK", ["a", "k"], ["b", "c"], {"axis": 1})], 3),
    "GridSample": ([("GridSample", ["a", "grid"], ["b"], {})], 4),
    "Identity": ([("Identity", ["a"], ["b"], {})], 4),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_between_convolutions_nothing_is_transposed(name: str, rng: np.random.Generator) -> None:
    nodes, channels = BETWEEN[name]
    x = rng.standard_normal((2, 3, 6, 8)).astype(np.float32)
    arrays = {
        "starts": np.array([3, 1]), "ends": np.array([0, 7]), "axes": np.array([1, 3]), "steps": np.array([-2, 2]),
        "pads": np.array([0, 0, 1, 2, 0, 0, 3, 0]), "twice": np.array([1, 1, 2, 2], np.float32), "k": np.array([3]),
        "sizes": np.array([2, 4, 3, 5]), "grid": rng.uniform(-1.2, 1.2, (2, 4, 5, 2)).astype(np.float32),
    }  # fmt: skip
    used = {i for n in nodes for i in n[1]}
    arrays = {k: v for k, v in arrays.items() if k in used}
    arrays["w1"] = rng.standard_normal((4, 3, 1, 1)).astype(np.float32)
    arrays["w2"] = rng.standard_normal((5, channels, 1, 1)).astype(np.float32)
    model = graph([("Conv", ["x", "w1"], ["a"], {}), *nodes, ("Conv", ["b", "w2"], ["y"], {})], x, arrays)
    against_onnxruntime(model, {"x": x})
    # One on the way in, one on the way out, one for each weight; DepthToSpace and its inverse are one.
    assert primitives(model, {"x": x})["transpose"] <= 4 + name.count("Depth") + (name == "TopK") * 2


# ---------------------------------------------------------------------------------------------
# Resize and sampling
# ---------------------------------------------------------------------------------------------

TRANSFORMS = ["half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners", "tf_crop_and_resize"]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_resize_against_onnxruntime(transform: str, mode: str, rng: np.random.Generator) -> None:
    x = rng.random((1, 2, 6, 5), np.float32)
    roi = np.array([0, 0, 0.1, 0.2, 1, 1, 0.8, 1.1], np.float32)
    attrs = {"mode": mode, "coordinate_transformation_mode": transform, "extrapolation_value": 2.5}
    for opset in (11, 19):
        for size in ((12, 7), (3, 4), (1, 3)):
            arrays = {"roi": roi, "scales": np.zeros(0, np.float32), "sizes": np.array([1, 2, *size])}
            for rounding in ("round_prefer_floor", "ceil")[: 1 + (mode == "nearest")]:
                model = one_node("Resize", {"x": x}, initializers=arrays, opset=opset, nearest_mode=rounding, **attrs)
                against_onnxruntime(model, {"x": x}, 1e-4)


@pytest.mark.parametrize(
    "attrs",
    [
        {"mode": "linear", "antialias": 1},
        {"mode": "cubic", "antialias": 1, "exclude_outside": 1},
        {"mode": "linear", "keep_aspect_ratio_policy": "not_larger"},
        {"mode": "cubic", "keep_aspect_ratio_policy": "not_smaller", "cubic_coeff_a": -0.5},
    ],
)
def test_resize_of_some_axes(attrs: dict[str, Any], rng: np.random.Generator) -> None:
    x = rng.random((1, 2, 12, 9), np.float32)
    arrays = {"sizes": np.array([7, 5])}
    for axes in ([2, 3], [3, 2]):
        model = one_node("Resize", {"x": x}, initializers=arrays, order=["x", "", "", "sizes"], axes=axes, **attrs)
        against_onnxruntime(model, {"x": x}, 1e-4)


@pytest.mark.parametrize("scales", [(2, 3), (1.5, 2.3), (0.6, 0.7)])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_the_oldest_resizes(scales: tuple[float, float], mode: str, rng: np.random.Generator) -> None:
    x = rng.random((1, 2, 6, 5), np.float32)
    arrays = {"scales": np.array([1, 1, *scales], np.float32)}
    against_onnxruntime(one_node("Resize", {"x": x}, initializers=arrays, opset=10, mode=mode), {"x": x})
    if min(scales) > 1:
        against_onnxruntime(one_node("Upsample", {"x": x}, initializers=arrays, opset=9, mode=mode), {"x": x})
        attribute = arrays["scales"].tolist()
        against_onnxruntime(one_node("Upsample", {"x": x}, opset=7, mode=mode, scales=attribute), {"x": x})


def test_whole_nearest_scales_gather_nothing(rng: np.random.Generator) -> None:
    x = rng.random((1, 2, 6, 5), np.float32)
    attrs = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    for scale in (2, 0.5):
        arrays = {"scales": np.array([1, 1, scale, 1], np.float32)}
        model = one_node("Resize", {"x": x}, initializers=arrays, order=["x", "", "scales"], **attrs)
        assert "gather" not in primitives(model, {"x": x})


def test_integers_are_rounded_once() -> None:
    x = np.array([[[[0, 1], [0, 1]]]], np.uint8)  # 0.25 and 0.75 stay apart; rounded per axis too
    arrays = {"sizes": np.array([1, 1, 3, 4])}
    y = run(one_node("Resize", {"x": x}, initializers=arrays, order=["x", "", "", "sizes"], mode="linear"), {"x": x})[0]
    assert y.dtype == np.uint8
    assert y.tolist() == [[[[0, 0, 1, 1]] * 3]]


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_grid_sample(mode: str, padding: str, rng: np.random.Generator) -> None:
    for corners in (0, 1):
        for rank in (2, 3) if mode != "cubic" else (2,):
            inputs = {
                "x": rng.random((2, 3, *(5, 6, 4)[:rank]), np.float32),
                "g": rng.uniform(-2, 2, (2, *(4, 7, 3)[:rank], rank)).astype(np.float32),
            }
            attrs = {"mode": mode, "padding_mode": padding, "align_corners": corners}
            against_onnxruntime(one_node("GridSample", inputs, opset=20, **attrs), inputs)


def test_the_gradient_reaches_the_grid(rng: np.random.Generator) -> None:
    x, g = rng.random((1, 2, 5, 6), np.float32), rng.uniform(-0.9, 0.9, (1, 3, 3, 2)).astype(np.float32)
    fn = trace(load(one_node("GridSample", {"x": x, "g": g}, opset=20)))
    total = lambda g: fn({}, {"x": x, "g": g})["y"].sum()  # noqa: E731
    slope = np.asarray(jax.jit(jax.grad(total))(g))
    step = np.zeros_like(g)
    step[0, 1, 1, 0] = 1e-3
    assert float(total(g + step) - total(g - step)) / 2e-3 == pytest.approx(slope[0, 1, 1, 0], rel=0.02)


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("ratio", [0, 2])
def test_roi_align(mode: str, ratio: int, rng: np.random.Generator) -> None:
    x, rois = rng.standard_normal((2, 3, 12, 17)).astype(np.float32), rng.uniform(0, 20, (6, 4)).astype(np.float32)
    rois[:, 2:] += rois[:, :2]
    rois[0], rois[1] = (3, 3, 2.5, 2.5), (-3, -4, 5, 30)
    inputs = {"x": x, "rois": rois, "batch": np.array([0, 1, 0, 1, 1, 0])}
    for transform in ("half_pixel", "output_half_pixel"):
        model = one_node(
            "RoiAlign", inputs, opset=16, mode=mode, sampling_ratio=ratio, coordinate_transformation_mode=transform,
            output_height=3, output_width=4, spatial_scale=0.7,
        )  # fmt: skip
        against_onnxruntime(model, inputs)


def test_max_roi_pool(rng: np.random.Generator) -> None:
    rois = np.array(
        [[0, 1, 1, 9, 8], [1, 0, 0, 16, 11], [0, 5, 5, 5, 5], [1, 10, 2, 30, 40], [1, 20, 20, 30, 30]], np.float32
    )
    inputs = {"x": rng.standard_normal((2, 3, 12, 17)).astype(np.float32), "rois": rois}
    for scale in (1.0, 0.5):
        against_onnxruntime(one_node("MaxRoiPool", inputs, opset=11, pooled_shape=[3, 2], spatial_scale=scale), inputs)


@pytest.mark.parametrize("center", [0, 1])
def test_non_max_suppression(center: int, rng: np.random.Generator) -> None:
    inputs = {"boxes": rng.random((2, 40, 4), np.float32), "scores": rng.random((2, 3, 40), np.float32)}
    arrays = {"most": np.array([5]), "iou": np.array([0.3], np.float32), "least": np.array([0.4], np.float32)}
    model = one_node("NonMaxSuppression", inputs, initializers=arrays, center_point_box=center)
    against_onnxruntime(model, inputs)


# ---------------------------------------------------------------------------------------------
# Transformations
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "arrays", "attrs"),
    [
        ("Gather", {"i": np.array([1, -1])}, {"axis": 1}),
        ("Slice", {"s": np.array([4]), "e": np.array([0]), "a": np.array([2]), "t": np.array([-2])}, {}),
        ("Resize", {"roi": np.zeros(0, np.float32), "s": np.array([1, 1, 2, 1.5], np.float32)}, {"mode": "linear"}),
        ("TopK", {"k": np.array([2])}, {"axis": 1, "largest": 0}),
        ("ReverseSequence", {"lengths": np.array([2, 3])}, {"batch_axis": 0, "time_axis": 1}),
    ],
)
def test_vmap_is_a_loop(op: str, arrays: Any, attrs: Any, rng: np.random.Generator) -> None:
    x = rng.random((4, 2, 3, 5, 6), np.float32)
    fn = trace(load(one_node(op, {"x": x[0]}, initializers=arrays, **attrs)))
    batched = jax.vmap(lambda v: fn(fn.graph.params, {"x": v})["y"])(x)
    for part, whole in zip(x, batched, strict=True):
        np.testing.assert_allclose(whole, fn(fn.graph.params, {"x": part})["y"], rtol=1e-6)


# ---------------------------------------------------------------------------------------------
# Sequences and text
# ---------------------------------------------------------------------------------------------


def test_a_sequence_keeps_its_type_in_a_file(rng: np.random.Generator) -> None:
    nodes = [helper.make_node("SequenceInsert", ["xs", "x"], ["y"])]
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.INT64, ["n"]))
    values = [helper.make_value_info("xs", kind), helper.make_tensor_value_info("x", TensorProto.INT64, ["n"])]
    proto = helper.make_graph(nodes, "g", values, [helper.make_value_info("y", kind)])
    model = to_model(load(helper.make_model(proto, opset_imports=[helper.make_opsetid("", 17)])))
    assert model.graph.output[0].type == kind
    x = np.array([1, 2])
    (y,) = run(model, {"xs": [x, x + (1 << 40)], "x": x})
    assert [v.tolist() for v in y] == [[1, 2], [1 + (1 << 40), 2 + (1 << 40)], [1, 2]]
    assert y[1].dtype == np.int64


def test_text_goes_in_and_out_beside_numbers() -> None:
    inputs = {"words": np.array(["b", "a"], object), "x": np.array([1, 2], np.float32)}
    nodes = [
        helper.make_node("StringConcat", ["words", "words"], ["twice"]),
        helper.make_node("RegexFullMatch", ["twice"], ["match"], pattern="a+"),
        helper.make_node("Where", ["match", "x", "zero"], ["y"]),
    ]
    values = [helper.make_tensor_value_info("words", TensorProto.STRING, [2])]
    values += [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])]
    outputs = [helper.make_tensor_value_info("twice", TensorProto.STRING, [2])]
    outputs += [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])]
    zero = numpy_helper.from_array(np.zeros(1, np.float32), "zero")
    model = helper.make_model(helper.make_graph(nodes, "g", values, outputs, [zero]))
    fn = trace(load(model))
    for words in (["b", "a"], ["a", "a"], ["b", "a"]):  # the last one is compiled already
        result = fn(fn.graph.params, inputs | {"words": np.array(words, object)})
        assert result["twice"].tolist() == [w + w for w in words]
        assert result["y"].tolist() == [v if w == "a" else 0 for w, v in zip(words, (1, 2), strict=True)]
