"""`jq.zoo`: the bundled files are what its README says; the oracle is onnxruntime."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

import jq.zoo
from jq.errors import ConfigError

# README.md states 92.60 and 91.20 %; another onnxruntime may turn a near tie or two.
LEAST_ACCURACY = {"fashion_resnet": 0.92, "fashion_mobilenet": 0.91}
SETS = {"evaluation": jq.zoo.evaluation_set, "calibration": jq.zoo.calibration_set}


@pytest.mark.parametrize(("name", "count"), [("evaluation", 3000), ("calibration", 512)])
def test_set_is_normalised_and_balanced(name: str, count: int) -> None:
    images, labels = SETS[name]()
    assert images.shape == (count, 1, 28, 28)
    assert images.dtype == np.float32
    assert labels.shape == (count,)
    assert np.issubdtype(labels.dtype, np.integer)
    per_class = np.bincount(labels, minlength=len(jq.zoo.CLASSES))
    assert len(per_class) == len(jq.zoo.CLASSES) == 10
    assert np.ptp(per_class) <= 1
    assert abs(images.mean()) < 0.05
    assert abs(images.std() - 1) < 0.05


def test_pixels_are_exact_multiples_of_1_255() -> None:
    images, _ = jq.zoo.calibration_set()
    pixels = (images * 0.3530 + 0.2860) * 255
    np.testing.assert_allclose(pixels, np.rint(pixels), atol=1e-3)


def test_sets_are_disjoint() -> None:
    evaluation, calibration = ({i.tobytes() for i in read()[0]} for read in SETS.values())
    assert not evaluation & calibration


def test_everything_is_small() -> None:
    folder = Path(jq.zoo.__file__).parent
    sizes = {p.name: p.stat().st_size for p in folder.iterdir() if p.is_file()}
    assert sum(sizes.values()) < 6e6
    assert all(sizes[f"{name}.onnx"] <= 1.2e6 for name in jq.zoo.models())


@pytest.mark.parametrize("name", jq.zoo.models())
def test_graph(name: str) -> None:
    model = onnx.load(jq.zoo.path(name))
    onnx.checker.check_model(model, full_check=True)
    assert model.ir_version == 8
    assert model.opset_import[0].version == 17
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("BatchNormalization") == kinds.count("Conv") > 10
    assert "Add" in kinds
    assert ("Clip" if "mobilenet" in name else "Relu") in kinds
    explicit = {"strides", "pads", "dilations", "group", "kernel_shape"}
    assert all(explicit <= {a.name for a in node.attribute} for node in model.graph.node if node.op_type == "Conv")
    (source,), (target,) = model.graph.input, model.graph.output
    assert (source.name, target.name) == ("input", "logits")
    shape = [d.dim_param or d.dim_value for d in source.type.tensor_type.shape.dim]
    assert shape == ["N", 1, 28, 28]


@pytest.mark.parametrize("name", jq.zoo.models())
def test_accuracy(name: str) -> None:
    images, labels = jq.zoo.evaluation_set()
    session = ort.InferenceSession(jq.zoo.path(name), providers=["CPUExecutionProvider"])
    logits = session.run(None, {"input": images})[0]
    assert (logits.argmax(1) == labels).mean() >= LEAST_ACCURACY[name]


def test_mobilenet_depthwise_channels_are_uneven() -> None:
    model = onnx.load(jq.zoo.path("fashion_mobilenet"))
    arrays = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    ratios = []
    for conv, norm in zip(model.graph.node, model.graph.node[1:], strict=False):
        if conv.op_type == "Conv" and "depthwise" in conv.name:
            scale, var = arrays[norm.input[1]], arrays[norm.input[4]]
            ranges = np.abs(arrays[conv.input[1]]).max((1, 2, 3)) * scale / np.sqrt(var + 1e-5)
            ratios.append(ranges.max() / np.median(ranges))
    assert len(ratios) == 8
    assert np.median(ratios) > 10


def test_unknown_name_lists_the_models_and_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"fashion_resnet, fashion_mobilenet.*'fashion_resnet'\?"):
        jq.zoo.path("fashion_resnt")
