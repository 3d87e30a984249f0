"""Heads of detectors, by structure: nodes of a head are named `h*` here, and no others; nothing is found elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import jq
from jq.config import QuantConfig, presets
from jq.evidence.lint import lint
from jq.plan.heads import heads
from jq.plan.selection import selected
from jq.readings.data_shapes import untraceable
from tests.networks import network
from tests.passes.models import build

SIZE = 32  # of the image


class Net:
    """A network as it grows: `net(op, *inputs)` adds a node and returns the name of its output."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.arrays: dict[str, np.ndarray] = {}
        self.random = np.random.default_rng(0)

    def __call__(
        self, op_type: str, *inputs: str | np.ndarray | list[int] | float, name: str = "", n: int = 1, **attrs: object
    ) -> str:
        name = name or f"b{len(self.nodes)}"
        names = [i if isinstance(i, str) else self.array(i) for i in inputs]
        outputs = [f"{name}_{k}" for k in range(n)]
        self.nodes.append(helper.make_node(op_type, names, outputs, name=name, **attrs))
        return outputs[0]

    def array(self, values: np.ndarray | list[int] | float) -> str:
        name = f"c{len(self.arrays)}"
        self.arrays[name] = np.array(values, np.int64 if isinstance(values, list) else np.float32)
        return name

    def head(self, op_type: str, *inputs: str | np.ndarray | list[int] | float, n: int = 1, **attrs: object) -> str:
        """A node that is to be left in float."""
        return self(op_type, *inputs, name=f"h{len(self.nodes)}", n=n, **attrs)

    def parts(self, x: str, sizes: list[int], axis: int = 1) -> list[str]:
        """The outputs of a Split of the head."""
        first = self.head("Split", x, sizes, n=len(sizes), axis=axis)
        return [f"{first.removesuffix('_0')}_{k}" for k in range(len(sizes))]

    def conv(self, x: str, channels: tuple[int, int], kernel: int = 1, stride: int = 1) -> str:
        out, into = channels
        weight = self.random.normal(0, (into * kernel**2) ** -0.5, (out, into, kernel, kernel)).astype(np.float32)
        bias = self.random.normal(size=out).astype(np.float32)
        return self("Conv", x, weight, bias, strides=[stride] * 2, pads=[kernel // 2] * 4)

    def gemm(self, x: str, out: int, into: int) -> str:
        weight = self.random.normal(0, into**-0.5, (into, out)).astype(np.float32)
        return self("Add", self("MatMul", x, weight), self.random.normal(size=out).astype(np.float32))

    def silu(self, x: str) -> str:
        return self("Mul", x, self("Sigmoid", x))

    def scales(self) -> list[str]:
        """Features of 8 channels at 8 x 8 and at 4 x 4, the smaller ones by a residual block."""
        large = self.silu(self.conv(self("Relu", self.conv("x", (8, 3), 3, 2)), (8, 8), 3, 2))
        small = self("Relu", self.conv(large, (8, 8), 3, 2))
        return [large, self("Add", small, self.silu(self.conv(small, (8, 8))))]

    def model(self, *outputs: str, batch: int | str = 1) -> onnx.ModelProto:
        names = {old: f"y{k}" if k else "y" for k, old in enumerate(outputs)}
        for node in self.nodes:
            for group in (node.input, node.output):
                group[:] = [names.get(n, n) for n in group]
        return build(self.nodes, self.arrays, x=(batch, 3, SIZE, SIZE), outputs=list(names.values()))


def grid(size: int) -> np.ndarray:
    return np.stack(np.meshgrid(np.arange(size), np.arange(size)), -1).reshape(1, -1, 2).astype(np.float32) + 0.5


GRID = np.concatenate([grid(8), grid(4)], 1)  # (1, 80, 2)


# --- Detectors ---


def yolo8(batch: int | str = 1, masks: bool = False, suppressed: bool = False) -> onnx.ModelProto:
    """Boxes as distributions of 4 distances over 4 bins, and scores of 5 classes; beside them, prototypes of masks."""
    net, rows = Net(), []
    for x in net.scales():
        parts = [net.conv(net.silu(net.conv(x, (8, 8), 3)), (c, 8)) for c in (16, 5)]
        coefficients = [net.conv(x, (3, 8))] if masks else []
        both = net.head("Concat", *parts, *coefficients, axis=1)
        rows.append(net.head("Reshape", both, [0, 24 if masks else 21, -1]))
    every = net.head("Concat", *rows, axis=2)
    boxes, scores, *rest = net.parts(every, [16, 5, *([3] if masks else [])])
    bins = net.head("Transpose", net.head("Reshape", boxes, [0, 4, 4, -1]), perm=[0, 2, 1, 3])
    arange = np.arange(4, dtype=np.float32).reshape(1, 4, 1, 1)
    distances = net.head("Reshape", net.head("Conv", net.head("Softmax", bins, axis=1), arange), [0, 4, -1])
    before, after = net.parts(distances, [2, 2])
    low, high = net.head("Sub", GRID.transpose(0, 2, 1), before), net.head("Add", GRID.transpose(0, 2, 1), after)
    middle = net.head("Div", net.head("Add", low, high), 2.0)
    boxes = net.head("Mul", net.head("Concat", middle, net.head("Sub", high, low), axis=1), 4.0)
    scores = net.head("Sigmoid", scores)
    if suppressed:
        ends = net.head("Transpose", boxes, perm=[0, 2, 1])
        return net.model(net.head("NonMaxSuppression", ends, scores, [7], 0.5, 0.1), boxes)
    result = net.head("Concat", boxes, scores, *rest, axis=1)
    prototypes = [net.silu(net.conv(net("Relu", net.conv("x", (8, 3), 3, 4)), (3, 8)))] if masks else []
    return net.model(result, *prototypes, batch=batch)


def yolo5(scales: int = 2) -> onnx.ModelProto:
    """Three anchors, of which each has offsets, sizes, and confidences; one scale is recognised by these."""
    net, rows = Net(), []
    for x, side in list(zip(net.scales(), (8, 4), strict=True))[:scales]:
        maps = net.head("Reshape", net.conv(x, (30, 8)), [1, 3, 10, side, side])
        y = net.head("Sigmoid", net.head("Transpose", maps, perm=[0, 1, 3, 4, 2]))
        offsets, sizes, confidences = net.parts(y, [2, 2, 6], axis=4)
        places = net.head("Add", net.head("Mul", offsets, 2.0), grid(side).reshape(1, 1, side, side, 2))
        sizes = net.head("Mul", net.head("Pow", net.head("Mul", sizes, 2.0), 2.0), np.ones((1, 3, 1, 1, 2)) * 1.3)
        boxes = net.head("Concat", net.head("Mul", places, 8.0), sizes, confidences, axis=4)
        rows.append(net.head("Reshape", boxes, [1, -1, 10]))
    return net.model(net.head("Concat", *rows, axis=1) if scales > 1 else rows[0])


def ssd(decoded: bool) -> onnx.ModelProto:
    """Maps with channels last, boxes and scores each joined over scales; corners by a matrix where decoded."""
    net = Net()
    boxes, scores = [], []
    for x in net.scales():
        for rows, values in ((boxes, 4), (scores, 3)):
            last = net.head("Transpose", net.conv(x, (2 * values, 8), 3), perm=[0, 2, 3, 1])
            rows.append(net.head("Reshape", last, [1, -1, values]))
    boxes_, scores_ = net.head("Concat", *boxes, axis=1), net.head("Softmax", net.head("Concat", *scores, axis=1))
    if decoded:
        places, sizes = net.parts(net.head("Mul", boxes_, 0.1), [2, 2], axis=2)
        places = net.head("Add", places, np.repeat(GRID, 2, 1))
        boxes_ = net.head("Concat", places, net.head("Exp", sizes), axis=2)
        corners = np.array([[1, 0, 1, 0], [0, 1, 0, 1], [-0.5, 0, 0.5, 0], [0, -0.5, 0, 0.5]], np.float32)
        boxes_ = net.head("MatMul", boxes_, corners)
    return net.model(boxes_, scores_)


def yolox() -> onnx.ModelProto:
    """Boxes beside saturated scores at each scale; exponentials of sizes, times the stride."""
    net, rows = Net(), []
    for x in net.scales():
        boxes, objects, classes = (net.conv(x, (c, 8)) for c in (4, 1, 5))
        both = net.head("Concat", boxes, net.head("Sigmoid", objects), net.head("Sigmoid", classes), axis=1)
        rows.append(net.head("Flatten", net.head("Transpose", both, perm=[0, 2, 3, 1]), axis=3))
    rows = [net.head("Reshape", r, [1, -1, 10]) for r in rows]
    offsets, sizes, scores = net.parts(net.head("Concat", *rows, axis=1), [2, 2, 6], axis=2)
    places = net.head("Mul", net.head("Add", offsets, GRID), 8.0)
    return net.model(net.head("Concat", places, net.head("Mul", net.head("Exp", sizes), 8.0), scores, axis=2))


def retina() -> onnx.ModelProto:
    """One branch for all scales; the outputs are not decoded."""
    net = Net()
    weights = [net.random.normal(0, 0.1, (c, 8, 3, 3)).astype(np.float32) for c in (8, 10)]
    outputs = []
    for weight, values in zip(weights, (4, 5), strict=True):
        maps = [net("Conv", x, weight, pads=[1] * 4) for x in net.scales()]
        rows = [net.head("Reshape", net.head("Transpose", m, perm=[0, 2, 3, 1]), [1, -1, values]) for m in maps]
        outputs.append(net.head("Concat", *rows, axis=1))
    return net.model(outputs[0], net.head("Sigmoid", outputs[1]))


def queries(joined: bool) -> onnx.ModelProto:
    """Two layers on 64 tokens, as in DETR: boxes in units of the image beside the classes' logits."""
    net = Net()
    tokens = net("Transpose", net("Reshape", net.scales()[0], [1, 8, 64]), perm=[0, 2, 1])
    tokens = net.gemm(net("MatMul", net("Softmax", net.gemm(tokens, 64, 8)), tokens), 8, 8)
    boxes, logits = net.head("Sigmoid", net.gemm(net("Relu", net.gemm(tokens, 8, 8)), 4, 8)), net.gemm(tokens, 6, 8)
    if joined:
        return net.model(net.head("Concat", boxes, net.head("Sigmoid", logits), axis=2))
    return net.model(boxes, logits)


def text() -> onnx.ModelProto:
    """As EAST: one output of distances in pixels and an angle, and one of scores, which is a map by itself."""
    net = Net()
    x = net.scales()[0]
    distances = net.head("Mul", net.head("Sigmoid", net.conv(x, (4, 8))), 512.0)
    angle = net.head("Mul", net.head("Sub", net.head("Sigmoid", net.conv(x, (1, 8))), 0.5), 3.14159)
    return net.model(net("Sigmoid", net.conv(x, (1, 8))), net.head("Concat", distances, angle, axis=1))


DETECTORS: dict[str, Callable[[], onnx.ModelProto]] = {
    "yolo8": yolo8,
    "dynamic": lambda: yolo8("N"),
    "masks": lambda: yolo8(masks=True),
    "suppressed": lambda: yolo8(suppressed=True),
    "yolo5": yolo5,
    "yolo5 of one scale": lambda: yolo5(1),
    "ssd": lambda: ssd(False),
    "ssd decoded": lambda: ssd(True),
    "yolox": yolox,
    "retina": retina,
    "detr": lambda: queries(False),
    "detr joined": lambda: queries(True),
    "text": text,
}


def float_names(model: onnx.ModelProto) -> set[str]:
    return {n.name for head in heads(jq.load(model)) for n in head.nodes}


def by_hand(model: onnx.ModelProto) -> set[str]:
    return {n.name for n in model.graph.node if n.name.startswith("h")}


@pytest.mark.parametrize("name", DETECTORS)
def test_a_detectors_head_begins_behind_its_last_layers(name: str) -> None:
    model = DETECTORS[name]()
    assert float_names(model) == by_hand(model) != set()
    graph = jq.load(model)
    labels = {n.outputs[0]: n.label for n in graph.nodes}
    for config in (presets["XINT8"].replace(op_types=None), presets["A8W8"].replace(op_types=None)):
        assert {labels[o] for o in selected(graph, config)} == {n.name for n in model.graph.node} - by_hand(model)
        whole = config.replace(head="int8")
        assert len(selected(graph, whole)) == len(graph.nodes) - len(untraceable(graph))
        assert selected(graph, config.replace(strict_quark=True)) == selected(graph, whole)
        by_exclusion = whole.replace(exclude_subgraphs=tuple(head.ends for head in heads(graph)))
        assert selected(graph, by_exclusion) == selected(graph, config)


# --- Other networks ---


def classifier(*last: str) -> onnx.ModelProto:
    net = Net()
    x = net("Flatten", net("GlobalAveragePool", net.scales()[1]))
    x = net("Gemm", x, net.random.normal(size=(8, 10)).astype(np.float32))
    for op_type in last:
        x = net(op_type, x)
    return net.model(x)


def convolutional() -> onnx.ModelProto:
    """As SqueezeNet: the last layer is a convolution."""
    net = Net()
    return net.model(net("Flatten", net("GlobalAveragePool", net("Relu", net.conv(net.scales()[1], (10, 8))))))


def inception() -> onnx.ModelProto:
    """A Concat of branches behind the last layers, with unlike activations of which none is a score; pooled."""
    net = Net()
    large, small = net.scales()
    up = net("Resize", small, "", np.array([1, 1, 2, 2], np.float32))
    branches = [net.silu(net.conv(large, (8, 8))), net.conv(up, (8, 8)), net("MaxPool", up, kernel_shape=[1, 1])]
    return net.model(net("GlobalAveragePool", net("Concat", *branches, axis=1)))


def unet(last: str) -> onnx.ModelProto:
    net = Net()
    large, small = net.scales()
    up = net("Resize", small, "", np.array([1, 1, 2, 2], np.float32))
    x = net.conv(net("Relu", net.conv(net("Concat", large, up, axis=1), (8, 16), 3)), (3, 8))
    x = net("Resize", x, "", np.array([1, 1, 4, 4], np.float32), mode="linear")
    return net.model(net("ArgMax", x, axis=1) if last == "ArgMax" else net(last, x))


def side_outputs() -> onnx.ModelProto:
    """As U2-Net: maps of several scales, each saturated, and a layer that joins them."""
    net = Net()
    maps = [net.conv(x, (1, 8)) for x in net.scales()]
    maps[1] = net("Resize", maps[1], "", np.array([1, 1, 2, 2], np.float32))
    return net.model(*(net("Sigmoid", m) for m in (net.conv(net("Concat", *maps, axis=1), (1, 2)), *maps)))


def recognizer() -> onnx.ModelProto:
    net = Net()
    steps = net("Transpose", net("Reshape", net.scales()[1], [1, 8, 16]), perm=[0, 2, 1])
    return net.model(net("Softmax", net.gemm(steps, 12, 8), axis=2))


def plates() -> onnx.ModelProto:
    """A layer for each character, and one output."""
    net = Net()
    x = net("Flatten", net("GlobalAveragePool", net.scales()[1]))
    each = [net("Reshape", net.gemm(x, 12, 8), [1, 1, 12]) for _ in range(4)]
    return net.model(net("Softmax", net("Concat", *each, axis=1), axis=2))


def encoder(parts: bool) -> onnx.ModelProto:
    """Pooled and normalized, of the whole and of parts."""
    net = Net()
    x = net.silu(net.conv(net.scales()[0], (8, 8)))
    pooled = net("Flatten", net("GlobalAveragePool", x))
    if parts:
        more = [net("Flatten", net.conv(net("GlobalMaxPool", x), (8, 8))) for _ in range(2)]
        pooled = net("Concat", pooled, *more, axis=1)
    length = net("ReduceL2", pooled, axes=[1], keepdims=1)
    return net.model(net("Div", pooled, net("Clip", length, 1e-12)))


def regions() -> onnx.ModelProto:
    """Attention in the body: its product and its Softmax lead to a layer."""
    net = Net()
    tokens = net("Reshape", net.scales()[0], [1, 8, 64])
    weights = net("Softmax", net("MatMul", net("Transpose", tokens, perm=[0, 2, 1]), tokens))
    joined = net("Concat", net("MatMul", tokens, weights), tokens, axis=1)
    return net.model(net("Relu", net.conv(net("Reshape", joined, [1, 16, 8, 8]), (4, 16))))


def attended(distributed: bool) -> onnx.ModelProto:
    """Tokens of eight numbers, and of four: averages by attention, or shares."""
    net = Net()
    tokens = net("Transpose", net("Reshape", net.scales()[0], [1, 8, 64]), perm=[0, 2, 1])
    four, tokens = net.gemm(tokens, 4, 8), net.gemm(tokens, 8, 8)
    if distributed:
        return net.model(net("Softmax", four), tokens)
    weights = net("Softmax", net("MatMul", four, net("Transpose", four, perm=[0, 2, 1])))
    return net.model(net("MatMul", weights, four), tokens)


def gated() -> onnx.ModelProto:
    """What goes on to a layer, joined with shares of it."""
    net = Net()
    x = net("Elu", net.scales()[0])
    joined = net("Concat", net("Softmax", x), net("Exp", x), axis=1)
    return net.model(net.conv(x, (4, 8)), joined)


OTHERS: dict[str, Callable[[], onnx.ModelProto]] = {
    "logits": classifier,
    "probabilities": lambda: classifier("Softmax"),
    "labels": lambda: classifier("Sigmoid"),
    "convolutional": convolutional,
    "inception": inception,
    "classes of pixels": lambda: unet("ArgMax"),
    "saliency": lambda: unet("Sigmoid"),
    "side outputs": side_outputs,
    "recognizer": recognizer,
    "plates": plates,
    "encoder": lambda: encoder(False),
    "parts": lambda: encoder(True),
    "regions": regions,
    "attended": lambda: attended(False),
    "distributed": lambda: attended(True),
    "gated": gated,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_networks_have_no_head(name: str) -> None:
    model = OTHERS[name]()
    assert float_names(model) == set()
    assert float_names(onnx.version_converter.convert_version(model, 20)) == set()
    config = presets["XINT8"]
    graph = jq.prepare(jq.load(model), config)
    assert selected(graph, config) == selected(graph, config.replace(head="int8"))
    assert "detection-head" not in [f.rule for f in lint(model)]


@pytest.mark.parametrize("seed", [9, 14, 26, 46, 59, 86, 130, 156])
def test_random_networks_have_no_head(seed: int) -> None:
    assert not heads(jq.load(network(seed).model))


def test_a_model_without_layers_has_a_head_where_it_suppresses() -> None:
    nodes = [
        helper.make_node("Concat", ["x", "x"], ["a"], name="joined", axis=1),
        helper.make_node("NonMaxSuppression", ["a", "s", "k"], ["y"], name="suppressed"),
    ]
    scores = helper.make_tensor_value_info("s", TensorProto.FLOAT, (1, 3, 16))
    model = build(nodes, {"k": np.array([4])}, x=(1, 8, 4), extra_inputs=[scores])
    assert float_names(model) == {"joined", "suppressed"}
    del model.graph.node[1:]
    model.graph.output[0].name = "a"
    assert float_names(model) == set()


# --- What becomes of it ---


def images(count: int = 4) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(3).normal(size=(count, 3, SIZE, SIZE)).astype(np.float32)}


def plain(preset: str = "XINT8", **options: Any) -> QuantConfig:
    """A preset without what takes time and does not concern heads."""
    return presets[preset].replace(cle=False, bias_correction=False, guard=None, **options)


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray], outputs: Sequence[str] = ()) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(v) for v in session.run(list(outputs) or None, feeds)]


@pytest.mark.parametrize(("name", "preset"), [("masks", "XINT8"), ("ssd", "A8W8")])
def test_a_float_head_reads_quantized_outputs_of_layers(
    name: str, preset: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = DETECTORS[name]()
    quantized = jq.quantize(model, images(), plain(preset)).model
    (line,) = [r.getMessage() for r in caplog.records if "left in float" in r.getMessage()]
    assert "head='int8'" in line and f"{len(float_names(model))} nodes" in line

    producer = {o: n for n in quantized.graph.node for o in n.output}
    decoding = [n for n in quantized.graph.node if n.name in by_hand(model)]
    own = {o for n in decoding for o in n.output}
    entries = {i for n in decoding for i in n.input if i in producer and i not in own}
    assert len(decoding) == len(by_hand(model)) and entries
    for entry in entries:
        codes = producer[producer[entry].input[0]]
        assert (producer[entry].op_type, codes.op_type) == ("DequantizeLinear", "QuantizeLinear")
        assert producer[codes.input[0]].op_type == "Conv"
    readers = {r.op_type for r in quantized.graph.node for i in r.input if i in own}
    assert readers.isdisjoint({"QuantizeLinear", "DequantizeLinear"})

    # What the layers' codes stand for, decoded by the float model's own head.
    x = {"x": images()["x"][:1]}
    layers = {producer[producer[producer[e].input[0]].input[0]].name: e for e in entries}
    inside = {layer: next(n for n in model.graph.node if n.name == layer).output[0] for layer in layers}
    whole, probe = run(quantized, x), onnx.ModelProto.FromString(quantized.SerializeToString())
    probe.graph.output.extend(helper.make_tensor_value_info(e, TensorProto.FLOAT, None) for e in layers.values())
    given = dict(zip(inside.values(), run(probe, x, list(layers.values())), strict=True))
    outputs = [o.name for o in model.graph.output if o.name in own]
    tail = onnx.utils.Extractor(onnx.shape_inference.infer_shapes(model)).extract_model(list(inside.values()), outputs)
    expected = dict(zip(outputs, run(tail, given), strict=True))
    for output, value in zip(quantized.graph.output, whole, strict=True):
        if output.name in expected:
            np.testing.assert_array_equal(value, expected[output.name])


def test_an_eight_bit_head_loses_the_scores() -> None:
    model = yolo8()
    x = {"x": images()["x"][:1]}
    (expected,) = run(model, x)
    errors = {}
    for head in ("float", "int8"):
        (output,) = run(jq.quantize(model, images(), plain(head=head)).model, x)
        errors[head] = np.square(output - expected)[:, 4:].mean()
    assert 10 * errors["float"] < errors["int8"]


def test_lint_names_the_exclusion_that_does_the_same() -> None:
    model = yolo8()
    (finding,) = [f for f in lint(model) if f.rule == "detection-head"]
    assert finding.severity == "note"
    (warning,) = [f for f in lint(model, QuantConfig(head="int8")) if f.rule == "detection-head"]
    assert warning.severity == "warning"
    for text in (finding.message, warning.message):
        named = text[text.index("exclude_subgraphs=") :].removeprefix("exclude_subgraphs=")
        ends = QuantConfig.read("exclude_subgraphs", json.loads(named))
        config = plain(head="int8", exclude_subgraphs=ends)
        one, other = (jq.quantize(model, images(), c).model.graph for c in (config, plain()))
        assert one.SerializeToString() == other.SerializeToString()
    assert not [f for f in lint(model, "BF16") if f.rule == "detection-head"]
