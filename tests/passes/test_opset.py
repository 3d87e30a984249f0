"""`jq.passes.opset`: another version of the operator set, and the same function or an error."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from jq.errors import ConfigError
from jq.graph.read import load
from jq.graph.write import to_model
from jq.passes.opset import with_opset
from tests.conftest import onnxruntime_outputs
from tests.passes.models import build, node, normal

BOXES = {"r": np.array([[0, 0, 3, 3]], np.float32), "i": np.array([0])}
PADS = {"p": np.array([0, 0, 1, 1, 0, 0, 1, 1])}
SCALES = {"s": np.array([1, 1, 2, 2], np.float32)}
ROWS = {"i": np.array([[0]]), "u": normal(1, 4, 5, 6)}


def same(model: onnx.ModelProto, version: int) -> None:
    """Converted, and with the outputs that onnxruntime gives for the original."""
    graph = with_opset(load(model), version)
    assert graph.opset() == version
    converted = to_model(graph)
    onnx.checker.check_model(converted)
    x = normal(*(d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim))
    want, have = (onnxruntime_outputs(m, {"x": x})[0] for m in (model, converted))
    np.testing.assert_allclose(have, want, rtol=1e-6, atol=1e-6, strict=True)


def test_what_is_spelt_alike_keeps_its_nodes() -> None:
    for nodes, arrays, opset in (
        ([node("Relu", ["x"], ["y"])], {}, 21),
        ([node("Pad", ["x", "p"], ["y"], mode="reflect")], PADS, 19),
        ([node("Resize", ["x", "", "s"], ["y"], mode="linear")], SCALES, 19),
        ([node("ScatterND", ["x", "i", "u"], ["y"], reduction="add")], ROWS, 18),
    ):
        model = build(nodes, arrays, opset=opset)
        graph = load(model)
        assert with_opset(graph, 17).nodes is graph.nodes
        same(model, 17)


@pytest.mark.parametrize(
    ("reader", "arrays", "before", "after"),
    [
        (node("GridSample", ["x", "g"], ["y"], mode="cubic"), {"g": normal(2, 3, 3, 2)}, 20, 17),
        (node("RoiAlign", ["x", "r", "i"], ["y"], output_height=2, output_width=2), BOXES, 17, 15),
        (node("Pad", ["x", "p"], ["y"], mode="wrap"), PADS, 19, 17),
        (
            node("Resize", ["x", "", "s"], ["y"], coordinate_transformation_mode="half_pixel_symmetric"),
            SCALES, 19, 17,
        ),
        (node("ScatterND", ["x", "i", "u"], ["y"], reduction="max"), ROWS, 18, 17),
    ],
    ids=lambda v: getattr(v, "op_type", None),
)  # fmt: skip
def test_what_meant_another_thing_is_an_error(
    reader: onnx.NodeProto, arrays: dict[str, np.ndarray], before: int, after: int
) -> None:
    with pytest.raises(ConfigError, match=f"opset {before}, cannot be converted to opset {after}"):
        with_opset(load(build([reader], arrays, opset=before)), after)


def test_an_axis_that_moved_and_had_another_default_is_written_out() -> None:
    same(build([node("DFT", ["x"], ["y"])], x=(2, 4, 5, 1), opset=21), 17)
