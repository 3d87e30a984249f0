"""Broken and odd models, data and options: a clear error, or a file that onnxruntime runs as jq simulates it."""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import jq
from jq.cli import main
from jq.errors import ConfigError, DataError, Error, ModelError, UnsupportedOp
from tests.passes.models import batchnorm, build, node, normal, statistics

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SHAPE = ("N", 4, 6, 6)
IMAGES = normal(4, 4, 6, 6, seed=7)
W, B = {"w": normal(4, 4, 3, 3, seed=1)}, {"b": normal(4, seed=2)}
OLDER = b"an older file"


def info(name: str, *shape: Any, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def model(nodes: Sequence[onnx.NodeProto], arrays: Mapping[str, Any] = {}, **options: Any) -> onnx.ModelProto:
    return build(nodes, arrays, **{"x": SHAPE, **options})


def conv(source: str = "x", target: str = "y", *, w: str = "w", b: str = "", **attrs: Any) -> onnx.NodeProto:
    return node("Conv", [source, w, b] if b else [source, w], [target], **{"name": f"conv_{target}", **attrs})


def one(op: str, *more: str, **attrs: Any) -> list[onnx.NodeProto]:
    """A convolution, and an operator that reads it."""
    return [conv(target="a", pads=[1, 1, 1, 1]), node(op, ["a", *more], ["y"], name="odd", **attrs)]


SMALL = model([conv(b="b", pads=[1, 1, 1, 1]), ], W | B)  # what goes wrong is not in the model


# ---------------------------------------------------------------------------------------------
# What every case is held to
# ---------------------------------------------------------------------------------------------


def feeds_of(found: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Samples for the inputs of a model; dims of any size are 4."""
    rng, feeds = np.random.default_rng(3), {}
    arrays = {t.name for t in found.graph.initializer}
    for value in found.graph.input:
        if value.name in arrays:
            continue
        tensor = value.type.tensor_type
        shape = [d.dim_value if d.HasField("dim_value") else 4 for d in tensor.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        made = rng.standard_normal(shape) if np.issubdtype(dtype, np.floating) else rng.integers(0, 2, shape)
        feeds[value.name] = np.asarray(made).astype(dtype)
    return feeds


def onnxruntime_on(path: Path, feeds: Mapping[str, np.ndarray]) -> dict[str, Any]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [v.name for v in session.get_outputs()]
    return dict(zip(names, session.run(names, {v.name: feeds[v.name] for v in session.get_inputs()}), strict=True))


def works(
    made: Any, data: Any = ..., config: Any = "XINT8", *, feeds: Any = None, runs: bool = True, atol: float = 0.0, **options: Any
) -> jq.Result:
    """The result of quantizing, whose file is the model, alone in its folder, and computes what jq says."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out.onnx"
        output.write_bytes(OLDER)
        feeds = feeds_of(made) if feeds is None else feeds
        result = jq.quantize(made, feeds if data is ... else data, config, output=output, **options)
        assert os.listdir(folder) == ["out.onnx"]
        assert output.read_bytes() != OLDER
        assert onnx.load(output) == result.model
        onnx.checker.check_model(output, full_check=True)
        assert isinstance(made, onnx.ModelProto)
        assert [v.name for v in result.model.graph.output] == [v.name for v in made.graph.output]
        arrays = {t.name for t in made.graph.initializer}
        assert [v.name for v in result.model.graph.input] == [v.name for v in made.graph.input if v.name not in arrays]
        expected = jq.fake_quant(result.graph)(result.graph.params, result.plan, feeds)
        found = onnxruntime_on(output, feeds) if runs else {}
        for name, have in found.items():
            want = expected[name]
            pairs = zip(have, want, strict=True) if isinstance(have, list) else [(have, want)]
            for a, b in pairs:
                assert np.asarray(a).shape == np.asarray(b).shape
                np.testing.assert_allclose(np.asarray(b), a, rtol=1e-5, atol=atol + 1e-6, err_msg=name)
    return result


def fails(kind: type[Error], match: str, made: Any, data: Any = IMAGES, config: Any = "XINT8", **options: Any) -> None:
    """Quantizing is refused, in one line, and nothing in the output's folder has changed."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out.onnx"
        output.write_bytes(OLDER)
        with pytest.raises(kind, match=match) as caught:
            jq.quantize(made, data, config, output=output, **options)
        assert caught.type in (kind, *kind.__subclasses__())
        assert os.listdir(folder) == ["out.onnx"]
        assert output.read_bytes() == OLDER


# ---------------------------------------------------------------------------------------------
# Data
# ---------------------------------------------------------------------------------------------


class Reader:
    """As onnxruntime's, which some users write without `rewind`."""

    def __init__(self, items: Sequence[np.ndarray]) -> None:
        self.items = iter(items)

    def get_next(self) -> dict[str, np.ndarray] | None:
        item = next(self.items, None)
        return None if item is None else {"x": item}


def odd(value: float) -> np.ndarray:
    found = IMAGES.copy()
    found[2, 1, 3, 5] = value
    return found


BAD_DATA: dict[str, tuple[Any, str]] = {
    "wrong name": ({"image": IMAGES}, r"no input 'image'\. It has: x"),
    "missing input": ({}, r"input 'x' is missing; the model needs x: float32\[N,4,6,6\]"),
    "wrong rank": (IMAGES[0], r"'x': expected x: float32\[N,4,6,6\], found float32\[4,6,6\].*batch axis is missing"),
    "wrong dtype": (IMAGES.astype(np.float64), r"'x': expected .*, found float64.*convert it first"),
    "bytes": (np.zeros((2, 4, 6, 6), np.uint8), r"found uint8.*normalise"),
    "wrong size": (IMAGES[:, :, :5], r"'x': expected .*, found float32\[4,4,5,6\]"),
    "channels last": (IMAGES.transpose(0, 2, 3, 1), r"found float32\[4,6,6,4\]"),
    "empty list": ([], r"empty"),
    "no samples": (IMAGES[:0], r"there are no samples"),
    "no samples in a dict": ({"x": IMAGES[:0]}, r"there are no samples"),
    "batches of no samples": ([IMAGES[:0]], r"item 0: a batch of no samples"),
    "NaN": (odd(np.nan), r"feed 2: input 'x' has 1 of 144 values NaN or Inf, the first nan at \[0, 1, 3, 5\]"),
    "Inf": (odd(-np.inf), r"feed 2: input 'x' has .*-inf"),
    "NaN in a list": ([IMAGES, odd(np.nan)], r"feed 6: input 'x' has 1 of"),
    "number": (3.5, r"data of type 'float'"),
    "text": ("no/such/folder", r"cannot read no/such/folder"),
    "strings": ([["cat"]], r"input 'x'.*"),
    "list of lists": ([[[1.0, 2.0], [3.0]]], r"input 'x' is no array"),
    "images and labels": ([(IMAGES, np.zeros(4, np.int64))], r"input 'x' is no array.*loader of \(images, labels\)"),
    "none in a list": ([None], r"input 'x'"),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_data_that_are_refused(name: str) -> None:
    data, match = BAD_DATA[name]
    fails(DataError, match, SMALL, data)


def test_exhausted_readers_and_generators() -> None:
    fails(DataError, "the data are empty", SMALL, iter([]))
    fails(DataError, "the data are empty", SMALL, Reader([]))


def test_an_error_in_the_users_reader_stays_what_it_is() -> None:
    def items() -> Iterator[np.ndarray]:
        yield IMAGES
        raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        jq.quantize(SMALL, items())


def test_empty_folder(tmp_path: Path) -> None:
    fails(DataError, "holds neither arrays nor images", SMALL, tmp_path)


GOOD_DATA: dict[str, Any] = {
    "zeros": np.zeros_like(IMAGES),
    "constant": np.full_like(IMAGES, 0.7),
    "one sample": IMAGES[:1],
    "denormal": np.full_like(IMAGES, 1e-40),
    "smallest normal": np.full_like(IMAGES, np.finfo(np.float32).tiny),
    "negative zero": -np.zeros_like(IMAGES),
    "tiny": IMAGES * np.float32(1e-20),
    "one outlier": odd(1e6),
    "not contiguous": np.moveaxis(np.ascontiguousarray(np.moveaxis(IMAGES, 1, -1)), -1, 1),
    "fortran order": np.asfortranarray(IMAGES),
    "big endian": IMAGES.astype(">f4"),
    "python lists": IMAGES.tolist(),
    "batches of other sizes": [IMAGES[:3], IMAGES[3:]],
    "tuple": (IMAGES,),
    "none": None,
}


@pytest.mark.parametrize("config", ["XINT8", "A8W8"])
@pytest.mark.parametrize("name", GOOD_DATA)
def test_data_that_are_odd(name: str, config: str) -> None:
    data = GOOD_DATA[name]
    works(SMALL, data, config, feeds={"x": IMAGES})


@pytest.mark.parametrize("config", ["XINT8", "A8W8", "U8S8_AAWS"])
@pytest.mark.parametrize("scale", [1e30, 3e38])
def test_huge_data(scale: float, config: str) -> None:
    data = np.full_like(IMAGES, scale)
    try:
        result = jq.quantize(SMALL, data, config)
    except DataError as error:
        assert "Inf" in str(error) or "NaN" in str(error)
    else:
        for found in (*result.plan.activations.values(), *result.plan.weights.values()):
            assert np.isfinite(found.scale).all() and (np.asarray(found.scale) > 0).all()


@pytest.mark.parametrize("config", ["XINT8", "A8W8", "U8S8_AAWS"])
def test_data_that_are_read_once(config: str) -> None:
    again = works(SMALL, [IMAGES, IMAGES], config)
    for data in (iter([IMAGES, IMAGES]), Reader([IMAGES, IMAGES])):
        try:
            assert works(SMALL, data, config).plan.activations.keys() == again.plan.activations.keys()
        except DataError as error:
            assert "read only once" in str(error)  # a histogram between the ends of all data reads twice


# ---------------------------------------------------------------------------------------------
# Models that are refused
# ---------------------------------------------------------------------------------------------


def quantized(format: str = "qdq", config: str = "A8W8") -> onnx.ModelProto:
    return jq.quantize(SMALL, IMAGES, config, format=format).model  # type: ignore[arg-type]


def dynamic() -> onnx.ModelProto:
    return jq.quantize(SMALL, None, "UINT8_DYNAMIC_QUANT").model


def custom(domain: str = "com.acme") -> onnx.ModelProto:
    found = model(one("Relu"), W)
    found.graph.node[1].op_type, found.graph.node[1].domain = "Magic", domain
    found.opset_import.add(domain=domain, version=1)
    return found


def reads_nothing() -> onnx.ModelProto:
    graph = helper.make_graph([node("Add", ["c", "c"], ["y"])], "g", [], [info("y", 2)], [numpy_helper.from_array(np.ones(2, "f4"), "c")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def weight_of(value: float) -> onnx.ModelProto:
    w = W["w"].copy()
    w[1, 2, 0, 1] = value
    return model([conv()], {"w": w})


BAD_MODELS: dict[str, tuple[Callable[[], Any], type[Error], str]] = {
    "quantized": (quantized, ModelError, r"quantized already: node .* is a (De)?[qQ]uantizeLinear"),
    "quantized to QOperator": (lambda: quantized("qoperator"), ModelError, r"quantized already"),
    "quantized dynamically": (dynamic, ModelError, r"quantized already"),
    "quantized by vitis": (lambda: quantized("vitis_qdq", "XINT8"), ModelError, r"quantized already"),
    "fix neurons": (lambda: quantized("fix_neuron", "XINT8"), ModelError, r"quantized already"),
    "custom operator": (custom, UnsupportedOp, r"no rule for com.acme::Magic \(opset 1\).*'odd'"),
    "no inputs": (reads_nothing, DataError, r"no inputs"),
    "NaN in a weight": (lambda: weight_of(np.nan), ModelError, r"'w'.*NaN"),
    "Inf in a weight": (lambda: weight_of(np.inf), ModelError, r"'w'.*Inf"),
    "NaN in a bias": (lambda: model([conv(b="b")], W | {"b": np.full(4, np.nan, "f4")}), ModelError, r"'b'.*NaN"),
    "empty bytes": (lambda: b"", ModelError, r"not an ONNX model"),
    "truncated bytes": (lambda: SMALL.SerializeToString()[:-40], ModelError, r"truncated"),
    "text": (lambda: b"this is no model, but a text", ModelError, r"not an ONNX model"),
    "missing file": (lambda: "no/such/model.onnx", ModelError, r"cannot read the model no/such/model.onnx: No such file"),
    "folder": (lambda: "/tmp", ModelError, r"cannot read the model /tmp: Is a directory"),
    "null byte": (lambda: "a\0b", ModelError, r"cannot read"),
    "unknown opset": (lambda: model([conv()], W, opset=17).__class__.FromString(_opset(SMALL, 99)), ModelError, "opset 99"),
    "None": (lambda: None, ModelError, r"NoneType"),
    "number": (lambda: 7, ModelError, r"int"),
}


def _opset(made: onnx.ModelProto, version: int) -> bytes:
    found = onnx.ModelProto()
    found.CopyFrom(made)
    found.opset_import[0].version = version
    return found.SerializeToString()


@pytest.mark.parametrize("name", BAD_MODELS)
def test_models_that_are_refused(name: str) -> None:
    made, kind, match = BAD_MODELS[name]
    fails(kind, match, made())
