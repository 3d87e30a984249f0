"""A bundled network with half of its layers, for tests of which the layers are not the subject: they compile half as long."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper

import jq

LAST = "stage2.0.relu"  # behind a stem, two residual blocks, and one with a stride and a shortcut


@functools.cache
def short_resnet() -> str:
    """The path of fashion_resnet without its last three blocks, with a head that is fitted to the calibration set."""
    model = onnx.load(jq.zoo.path("fashion_resnet"))
    nodes = list(model.graph.node)
    head = {node.name: node for node in nodes if node.name in ("pool.mean", "pool", "logits")}
    head["pool.mean"].input[0] = LAST
    kept = nodes[: next(i for i, node in enumerate(nodes) if LAST in node.output) + 1] + list(head.values())
    weights = {t.name: t for t in model.graph.initializer}
    features = _run(_model(model, kept[:-1], weights.values(), "pool"))
    images, labels = jq.zoo.calibration_set()
    x = features(images).reshape(len(images), -1)
    fitted = np.linalg.lstsq(np.c_[x, np.ones(len(x))], 8.0 * np.eye(10)[labels] - 4, rcond=None)[0].astype(np.float32)
    gemm = head["logits"]
    turned = next((a.i for a in gemm.attribute if a.name == "transB"), 0)
    matrix = fitted[:-1].T if turned else fitted[:-1]
    for name, array in zip(gemm.input[1:], (matrix, fitted[-1]), strict=True):
        weights[name] = numpy_helper.from_array(np.ascontiguousarray(array), name)
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / "short_resnet.onnx"
    onnx.save(_model(model, kept, weights.values(), "logits"), path)
    return str(path)


def _model(whole: onnx.ModelProto, nodes: list, weights, output: str) -> onnx.ModelProto:
    made = onnx.ModelProto()
    made.CopyFrom(whole)
    read = {name for node in nodes for name in node.input}
    del made.graph.node[:], made.graph.initializer[:], made.graph.value_info[:]
    made.graph.node.extend(nodes)
    made.graph.initializer.extend(w for w in weights if w.name in read)
    if output != "logits":
        del made.graph.output[:]
        made.graph.output.append(onnx.helper.make_tensor_value_info(output, onnx.TensorProto.FLOAT, None))
    return made


def _run(model: onnx.ModelProto):
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda images: session.run(None, {"input": images})[0]
