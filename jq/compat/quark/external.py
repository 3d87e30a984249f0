"""Models whose weights are stored in a file beside them, as `use_external_data_format` asks."""

from __future__ import annotations

import os

import onnx
from onnx import TensorProto

from jq.graph.read import load
from jq.graph.write import External, save


def store_outside(path: str | os.PathLike[str]) -> None:
    """Move the weights of a model file into `<name>.data` beside it, unless they are stored outside already.

    >>> import jq, os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     jq.save(jq.load(jq.zoo.path("fashion_resnet")), f"{folder}/model.onnx")
    ...     store_outside(f"{folder}/model.onnx")
    ...     sorted(os.listdir(folder))
    ['model.onnx', 'model.onnx.data']
    """
    stored = onnx.load(os.fspath(path), load_external_data=False).graph.initializer
    if not any(tensor.data_location == TensorProto.EXTERNAL for tensor in stored):
        save(load(path), path, external=External())
