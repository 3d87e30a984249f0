"""Broken and odd models, data and options: a clear error, or a file that onnxruntime runs as jq simulates it."""

from __future__ import annotations

import errno
import itertools
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
from tests.sampling import sampled

# ruff: noqa: PT017  an error and a right result are both good in some places

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


SMALL = model(
    [
        conv(b="b", pads=[1, 1, 1, 1]),
    ],
    W | B,
)  # what goes wrong is not in the model


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
    made: Any,
    data: Any = ...,
    config: Any = "XINT8",
    *,
    feeds: Any = None,
    runs: bool = True,
    atol: float = 0.0,
    **options: Any,
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
        if all(v.type.tensor_type.HasField("shape") for v in result.model.graph.output):
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
    "wrong rank": (IMAGES[0], r"'x': expected x: float32\[\?,4,6,6\], found float32\[4,6,6\].*batch axis is missing"),
    "wrong dtype": (IMAGES.astype(np.int32), r"'x': expected .*, found int32.*convert it first"),
    "bytes": (np.zeros((2, 4, 6, 6), np.uint8), r"found uint8.*normalise"),
    "wrong size": (IMAGES[:, :, :5], r"'x': expected .*, found float32\[4,4,5,6\]"),
    "channels last": (IMAGES.transpose(0, 2, 3, 1), r"found float32\[4,6,6,4\]"),
    "empty list": ([], r"empty"),
    "no samples": (IMAGES[:0], r"there are no samples"),
    "no samples in a dict": ({"x": IMAGES[:0]}, r"there are no samples"),
    "batches of no samples": ([IMAGES[:0]], r"item 0: the batch has no samples"),
    "NaN": (odd(np.nan), r"sample 2: input 'x' has 1 NaN or Inf among 144 values, the first nan at \[0, 1, 3, 5\]"),
    "Inf": (odd(-np.inf), r"sample 2: input 'x' has .*-inf"),
    "NaN in a list": ([IMAGES, odd(np.nan)], r"sample 6: input 'x' has 1 NaN or Inf among"),
    "number": (3.5, r"data of type 'float'"),
    "text": ("no/such/folder", r"cannot read no/such/folder"),
    "strings": ([["cat"]], r"input 'x'.*"),
    "list of lists": ([[[1.0, 2.0], [3.0]]], r"input 'x' is not an array"),
    "images and labels": (
        [(IMAGES, np.zeros(4, np.int64))],
        r"input 'x' is not an array.*loader of \(images, labels\)",
    ),
    "big endian": (IMAGES.astype(">f4"), r"found >f4.*convert it first"),
    "list of samples": (list(IMAGES), r"item 0: .*found float32\[4,6,6\]; the leading batch axis is missing"),
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
    "python numbers": [{"x": IMAGES.tolist()}],
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
            assert "reads the data twice" in str(error)  # a histogram between the ends of all data reads twice


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
    graph = helper.make_graph(
        [node("Add", ["c", "c"], ["y"])], "g", [], [info("y", 2)], [numpy_helper.from_array(np.ones(2, "f4"), "c")]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def weight_of(value: float) -> onnx.ModelProto:
    w = W["w"].copy()
    w[1, 2, 0, 1] = value
    return model([conv()], {"w": w})


def half() -> onnx.ModelProto:
    return model([conv()], {"w": W["w"].astype(np.float16)}, dtype=TensorProto.FLOAT16)


def double() -> onnx.ModelProto:
    return model([conv()], {"w": W["w"].astype(np.float64)}, dtype=TensorProto.DOUBLE)


def wired(source: str, weight: str) -> onnx.ModelProto:
    found = model([conv(target="a", pads=[1, 1, 1, 1]), node("Relu", ["a"], ["y"])], W)
    found.graph.node[0].input[:] = [source, weight]
    return found


def quantized_branch() -> onnx.ModelProto:
    found = with_if()
    then = next(a.g for a in found.graph.node[1].attribute if a.name == "then_branch")
    then.initializer.extend([numpy_helper.from_array(f(0.1), "s"), numpy_helper.from_array(np.array(3, np.uint8), "z")])
    del then.node[:]
    then.node.append(node("QuantizeLinear", ["a", "s", "z"], ["q"]))
    then.node.append(node("DequantizeLinear", ["q", "s", "z"], ["then_out"]))
    return found


BAD_MODELS: dict[str, tuple[Callable[[], Any], type[Error], str]] = {
    "quantized": (quantized, ModelError, r"quantized already: node .* is a (De)?[qQ]uantizeLinear"),
    "quantized to QOperator": (lambda: quantized("qoperator"), ModelError, r"quantized already"),
    "quantized dynamically": (dynamic, ModelError, r"quantized already"),
    "quantized by vitis": (lambda: quantized("vitis_qdq", "XINT8"), ModelError, r"quantized already"),
    "fix neurons": (lambda: quantized("fix_neuron", "XINT8"), ModelError, r"quantized already"),
    "custom operator": (custom, UnsupportedOp, r"no rule for com.acme::Magic \(opset 1\).*'odd'"),
    "no inputs": (reads_nothing, DataError, r"no inputs"),
    "cycle": (lambda: wired("y", "w"), ModelError, r"cyclic: node 'conv_a'"),
    "missing tensor": (lambda: wired("x", "nope"), ModelError, r"node 'conv_a' \(Conv\) reads 'nope'"),
    "quantized in a branch": (quantized_branch, ModelError, r"quantized already: node .* is a QuantizeLinear"),
    "wrong channels": (
        lambda: model([conv()], {"w": normal(4, 3, 3, 3)}),
        ModelError,
        r"'conv_y'.*4 channels.*3 input channels",
    ),
    "file object": (lambda: Reader([]), ModelError, r"a model of type 'Reader': expected a path"),
    "float16": (half, ModelError, r"'w' of node 'conv_y' \(Conv\) is float16; only float32 is quantized"),
    "float64": (double, ModelError, r"'w'.* is float64; only float32 is quantized"),
    "no channels": (
        lambda: model([conv()], {"w": np.zeros((0, 4, 1, 1), "f4")}),
        ModelError,
        r"'w'.*no elements.*\[0, 4, 1, 1\]",
    ),
    "no columns": (
        lambda: build([node("MatMul", ["x", "g"], ["y"])], {"g": np.zeros((6, 0), "f4")}, x=("N", 6)),
        ModelError,
        r"'g'.*no elements",
    ),
    "NaN in a weight": (lambda: weight_of(np.nan), ModelError, r"'w'.*NaN"),
    "Inf in a weight": (lambda: weight_of(np.inf), ModelError, r"'w'.*Inf"),
    "NaN in a bias": (lambda: model([conv(b="b")], W | {"b": np.full(4, np.nan, "f4")}), ModelError, r"'b'.*NaN"),
    "empty bytes": (lambda: b"", ModelError, r"not an ONNX model"),
    "truncated bytes": (lambda: SMALL.SerializeToString()[:-40], ModelError, r"truncated"),
    "text": (lambda: b"this is no model, but a text", ModelError, r"not an ONNX model"),
    "missing file": (
        lambda: "no/such/model.onnx",
        ModelError,
        r"cannot read the model no/such/model.onnx: No such file",
    ),
    "folder": (lambda: str(Path(__file__).parent), ModelError, r"cannot read the model .*tests: Is a directory"),
    "null byte": (lambda: "a\0b", ModelError, r"cannot read"),
    "unknown opset": (
        lambda: model([conv()], W, opset=17).__class__.FromString(_opset(SMALL, 99)),
        ModelError,
        "opset 99",
    ),
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


# ---------------------------------------------------------------------------------------------
# Models that are odd
# ---------------------------------------------------------------------------------------------

G = {"g": normal(5, 6, seed=4), "gb": normal(5, seed=5)}
SQUARE = {"w": normal(4, 4, 1, 1, seed=1)}
PADDED = {"pads": [1, 1, 1, 1]}


def c(value: Any, dtype: Any = np.int64) -> np.ndarray:
    return np.array(value, dtype)


def f(value: Any) -> np.ndarray:
    return np.array(value, np.float32)


def branch(name: str, *nodes: onnx.NodeProto) -> onnx.GraphProto:
    return helper.make_graph(nodes, name, [], [onnx.ValueInfoProto(name=f"{name}_out")])


def with_if() -> onnx.ModelProto:
    """Both branches read a tensor that is quantized outside, and one holds a convolution."""
    then = branch("then", node("Relu", ["a"], ["then_out"]))
    other = branch("other", conv("a", "other_out", **PADDED))
    nodes = [
        conv(target="a", **PADDED),
        node("If", ["cond"], ["i"], name="if", then_branch=then, else_branch=other),
        node("Add", ["a", "i"], ["y"]),
    ]
    found = model(nodes, W, extra_inputs=[info("cond", kind=TensorProto.BOOL)])
    found.graph.output[0].CopyFrom(info("y", "N", 4, 6, 6))
    return found


def with_loop() -> onnx.ModelProto:
    body = helper.make_graph(
        [node("Add", ["s", "a"], ["t"]), node("Identity", ["go"], ["still"])],
        "body",
        [info("i", kind=TensorProto.INT64), info("go", kind=TensorProto.BOOL), info("s", "N", 4, 6, 6)],
        [info("still", kind=TensorProto.BOOL), info("t", "N", 4, 6, 6)],
    )
    return model(
        [conv(target="a", **PADDED), node("Loop", ["n", "", "a"], ["l"], body=body), conv("l", "y")], W | {"n": c(3)}
    )


def with_function() -> onnx.ModelProto:
    found = model(one("Relu"), W)
    found.graph.node[1].op_type, found.graph.node[1].domain = "Twice", "local"
    opsets = [helper.make_opsetid("", 17)]
    found.functions.append(
        helper.make_function("local", "Twice", ["p"], ["q"], [node("Add", ["p", "p"], ["q"])], opsets)
    )
    found.opset_import.add(domain="local", version=1)
    return found


def as_input(made: onnx.ModelProto) -> onnx.ModelProto:
    """With its first initializer among the inputs, as old exporters write it."""
    tensor = made.graph.initializer[0]
    made.graph.input.append(info(tensor.name, *tensor.dims))
    return made


def renamed(made: onnx.ModelProto, names: Mapping[str, str]) -> onnx.ModelProto:
    for n in made.graph.node:
        n.name = names.get(n.name, n.name)
        for field in (n.input, n.output):
            field[:] = [names.get(i, i) for i in field]
    for value in (*made.graph.input, *made.graph.output, *made.graph.initializer):
        value.name = names.get(value.name, value.name)
    return made


def repeated_output() -> onnx.ModelProto:
    made = model([conv()], W)
    made.graph.output.append(made.graph.output[0])
    return made


def passed_on(*nodes: onnx.NodeProto, **arrays: np.ndarray) -> onnx.ModelProto:
    """The input is an output too."""
    made = model(nodes or [conv()], arrays or W)
    made.graph.output.append(info("x", *SHAPE))
    return made


def only_passed_on() -> onnx.ModelProto:
    graph = helper.make_graph([], "g", [info("x", 4)], [info("x", 4)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def weight_as_output() -> onnx.ModelProto:
    made = model([conv()], W)
    made.graph.output.append(info("w", 4, 4, 3, 3))
    return made


def sequence() -> onnx.ModelProto:
    made = model(
        [
            conv(target="a", **PADDED),
            node("SequenceConstruct", ["a", "x"], ["s"]),
            node("SequenceAt", ["s", "i"], ["t"]),
            conv("t", "y"),
        ],
        W | {"i": c(0)},
    )
    return made


def sequence_out() -> onnx.ModelProto:
    return model([conv(target="a", **PADDED), node("SplitToSequence", ["a"], ["y"], axis=1, keepdims=1)], W)


def nchw(*shape: Any, **arrays: np.ndarray) -> dict[str, Any]:
    return {"arrays": arrays, "x": shape}


def lstm() -> onnx.ModelProto:
    arrays = {"lw": normal(1, 12, 5), "lr": normal(1, 12, 3, seed=1)}
    return build(
        [
            node("LSTM", ["x", "lw", "lr"], ["", "y"], hidden_size=3),
        ],
        arrays,
        x=(4, "N", 5),
    )


def embedding() -> onnx.ModelProto:
    """Whole numbers beside floats."""
    nodes = [node("Gather", ["table", "i"], ["e"]), node("Add", ["e", "x"], ["a"]), node("MatMul", ["a", "g"], ["y"])]
    return build(
        nodes,
        {"table": normal(10, 6), "g": normal(6, 5, seed=1)},
        x=("N", 6),
        extra_inputs=[info("i", "N", kind=TensorProto.INT64)],
    )


def old(version: int, *nodes: onnx.NodeProto, **arrays: np.ndarray) -> onnx.ModelProto:
    return model(
        nodes
        or [
            conv(target="a", b="b"),
            node("Clip", ["a"], ["y"], min=0.0, max=6.0) if version < 11 else node("Relu", ["a"], ["y"]),
        ],
        arrays or W | B,
        opset=version,
    )


def recurring() -> onnx.ModelProto:
    """A weight that is read in both orders, and a bias that two convolutions share."""
    return model([conv(target="a", b="b", **PADDED), conv("a", b="b", **PADDED)], W | B)


NEWEST = 24  # that onnxruntime has all of
SPLIT = {"sizes": c([1, 3])}
LONG = "long " * 200

MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    # structure
    "no weights": lambda: model([node("Relu", ["x"], ["a"]), node("MaxPool", ["a"], ["y"], kernel_shape=[2, 2])]),
    "nothing to quantize": lambda: model([node("Sin", ["x"], ["a"]), node("Floor", ["a"], ["y"])]),
    "only Gemm": lambda: build(
        [node("Gemm", ["x", "g", "gb"], ["y"], transB=1)], {"g": normal(5, 6), "gb": normal(5)}, x=("N", 6)
    ),
    "MatMul of activations": lambda: model(
        [node("Transpose", ["x"], ["t"], perm=[0, 1, 3, 2]), node("MatMul", ["x", "t"], ["y"])]
    ),
    "identity": lambda: model([node("Identity", ["x"], ["y"])]),
    "output is input": only_passed_on,
    "input is an output too": passed_on,
    "input is an output, relu": lambda: passed_on(node("Relu", ["x"], ["y"]), z=f(0)),
    "constant beside": lambda: model([conv(), node("Relu", ["c"], ["d"])], W | {"c": normal(3)}, outputs=("y", "d")),
    "constant": lambda: model([node("Add", ["c", "d"], ["y"])], {"c": normal(3), "d": normal(3, seed=1)}),
    "constant by shape": lambda: model(
        [node("Mul", ["x", "z"], ["a"]), node("Conv", ["a", "w"], ["y"])], W | {"z": f(0)}
    ),
    "output twice": repeated_output,
    "outputs of one tensor": lambda: model([conv(), node("Identity", ["y"], ["z"])], W, outputs=("y", "z")),
    "inner outputs": lambda: model(
        [conv(target="a", **PADDED), node("Relu", ["a"], ["r"]), conv("r", "y")], W, outputs=("y", "r", "a")
    ),
    "no names": lambda: model([node("Conv", ["x", "w"], ["a"]), node("Relu", ["a"], ["y"])], W),
    "same names": lambda: model([conv(target="a", name="n", **PADDED), conv("a", name="n")], W),
    "unused": lambda: model([conv(), conv(target="nobody"), conv(target="nobody2", w="w2")], W | {"w2": W["w"] * 2}),
    "subgraphs": with_if,
    "loop": with_loop,
    "function": with_function,
    "sequence": sequence,
    "sequence as output": sequence_out,
    "initializer as input": lambda: as_input(model([conv()], W)),
    "whole numbers beside": embedding,
    "unused input": lambda: model([conv()], W, extra_inputs=[info("other", "N", 3)]),
    "LSTM": lstm,
    "whole numbers alone": lambda: build([node("Add", ["x", "x"], ["y"])], x=(4,), dtype=TensorProto.INT64),
    "no elements on the way": lambda: model(
        [node("Slice", ["x", "lo", "lo"], ["e"]), node("Concat", ["e", "x"], ["a"], axis=0), conv("a")],
        W | {"lo": c([0])},
    ),
    "float16 on the way": lambda: model(
        [
            conv(target="a"),
            node("Cast", ["a"], ["h"], to=TensorProto.FLOAT16),
            node("Relu", ["h"], ["r"]),
            node("Cast", ["r"], ["y"], to=TensorProto.FLOAT),
        ],
        W,
    ),
    # weights
    "weight shared": lambda: model([conv(target="a", **PADDED), conv("a")], W),
    "bias shared": recurring,
    "weight is bias": lambda: model(
        [conv(target="a", b="b"), node("Mul", ["a", "bb"], ["m"]), node("Add", ["m", "b1"], ["y"])],
        W | B | {"bb": f(2), "b1": f(1)},
    ),
    "weight is an output": weight_as_output,
    "zero weights": lambda: model([conv(b="b")], {"w": W["w"] * 0} | B),
    "zero weights and bias": lambda: model([conv(b="b")], {"w": W["w"] * 0, "b": B["b"] * 0}),
    "zero channel": lambda: model([conv(b="b")], {"w": W["w"] * f([0, 1, 1, 1]).reshape(4, 1, 1, 1)} | B),
    "denormal weights": lambda: model([conv(b="b")], {"w": np.full((4, 4, 3, 3), 1e-41, "f4")} | B),
    "huge bias": lambda: model([conv(b="b")], W | {"b": f([1e9, -1e9, 1, 0])}),
    "tiny weights": lambda: model([conv(b="b")], {"w": W["w"] * f(1e-25)} | B),
    "bias not constant": lambda: model(
        [
            node("GlobalAveragePool", ["x"], ["p"]),
            node("ReduceMean", ["p"], ["r"], axes=[0, 2, 3], keepdims=0),
            conv(b="r"),
        ],
        W,
    ),
    "weight not constant": lambda: model(
        [node("Slice", ["x", "lo", "hi"], ["k"]), conv(w="k")], {"lo": c([0, 0, 0, 0]), "hi": c([4, 4, 2, 2])}
    ),
    # shapes
    "batch of 1": lambda: model([conv()], W, x=(1, 4, 6, 6)),
    "batch of 4": lambda: model([conv(target="a"), node("Flatten", ["a"], ["y"])], W, x=(4, 4, 6, 6)),
    "dynamic size": lambda: model(
        [conv(target="a", **PADDED), node("GlobalAveragePool", ["a"], ["y"])], W, x=("N", 4, "H", "W")
    ),
    "rank 1": lambda: build([node("Mul", ["x", "s"], ["a"]), node("Sigmoid", ["a"], ["y"])], {"s": normal(4)}, x=(4,)),
    "scalar output": lambda: model([conv(target="a"), node("ReduceMean", ["a"], ["y"], keepdims=0)], W),
    "Conv1d": lambda: build([conv()], {"w": normal(3, 4, 3)}, x=("N", 4, 9)),
    "Conv3d": lambda: build([conv()], {"w": normal(3, 2, 2, 2, 2)}, x=("N", 2, 4, 4, 4)),
    # operators
    "groups": lambda: model([conv(group=2)], {"w": normal(6, 2, 3, 3)}),
    "depthwise": lambda: model([conv(group=4)], {"w": normal(4, 1, 3, 3)}),
    "depthwise times 2": lambda: model([conv(group=4, b="b8")], {"w": normal(8, 1, 3, 3), "b8": normal(8)}),
    "ConvTranspose": lambda: model(
        [node("ConvTranspose", ["x", "w", "b"], ["y"], group=2, strides=[2, 2], output_padding=[1, 1])],
        {"w": normal(4, 2, 3, 3), "b": normal(4)},
    ),
    "ConvTranspose to a size": lambda: model(
        [node("ConvTranspose", ["x", "w"], ["y"], strides=[2, 2], output_shape=[12, 12])], W
    ),
    "SAME_UPPER": lambda: model([conv(auto_pad="SAME_UPPER", strides=[2, 2])], {"w": normal(4, 4, 2, 2)}),
    "SAME_LOWER, dynamic": lambda: model(
        [conv(auto_pad="SAME_LOWER")], {"w": normal(4, 4, 2, 2)}, x=("N", 4, "H", "W")
    ),
    "VALID": lambda: model([conv(auto_pad="VALID")], W),
    "dilations": lambda: model([conv(dilations=[2, 1], pads=[1, 0, 2, 1])], W),
    "AveragePool, ceil_mode": lambda: model(
        [node("AveragePool", ["x"], ["y"], kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1, pads=[1, 0, 0, 1])]
    ),
    "AveragePool, count_include_pad": lambda: model(
        [node("AveragePool", ["x"], ["y"], kernel_shape=[3, 3], count_include_pad=1, pads=[1, 1, 1, 1])]
    ),
    "MaxPool with indices": lambda: model(
        [node("MaxPool", ["x"], ["y", "i"], kernel_shape=[2, 2], strides=[2, 2])], outputs=("y", "i")
    ),
    "MaxUnpool": lambda: model(
        [
            node("MaxPool", ["x"], ["p", "i"], kernel_shape=[2, 2], strides=[2, 2]),
            node("MaxUnpool", ["p", "i"], ["y"], kernel_shape=[2, 2], strides=[2, 2]),
        ]
    ),
    "Gemm, transA": lambda: build(
        [node("Gemm", ["x", "g", "gb"], ["y"], transA=1, alpha=0.5, beta=2.0)],
        {"g": normal(4, 5), "gb": normal(5)},
        x=(4, 3),
    ),
    "Gemm, alpha": lambda: build(
        [node("Gemm", ["x", "g", "gb"], ["y"], alpha=0.3, beta=-1.7)], {"g": normal(6, 5), "gb": normal(5)}, x=("N", 6)
    ),
    "Gemm without C": lambda: build([node("Gemm", ["x", "g"], ["y"])], {"g": normal(6, 5)}, x=("N", 6)),
    "Gemm, C not constant": lambda: build(
        [node("Relu", ["x"], ["r"]), node("Gemm", ["x", "g", "r"], ["y"])], {"g": normal(6, 6)}, x=("N", 6)
    ),
    "Gemm, scalar C": lambda: build(
        [node("Gemm", ["x", "g", "s"], ["y"])], {"g": normal(6, 5), "s": f(0.3)}, x=("N", 6)
    ),
    "Gemm, beta 0": lambda: build(
        [node("Gemm", ["x", "g", "gb"], ["y"], beta=0.0)], {"g": normal(6, 5), "gb": normal(5)}, x=("N", 6)
    ),
    "Clip with min": lambda: model(one("Clip", "lo"), W | {"lo": f(0)}),
    "Clip with max": lambda: model(one("Clip", "", "hi"), W | {"hi": f(6)}),
    "Clip without": lambda: model(one("Clip"), W),
    "Clip, min above max": lambda: model(one("Clip", "lo", "hi"), W | {"lo": f(2), "hi": f(1)}),
    "Clip, min is max": lambda: model(one("Clip", "lo", "hi"), W | {"lo": f(1), "hi": f(1)}),
    "Clip, not constant": lambda: model(
        [conv(target="a"), node("ReduceMax", ["x"], ["m"], keepdims=0), node("Clip", ["a", "", "m"], ["y"])], W
    ),
    "Softmax, axis 1": lambda: model(one("Softmax", axis=1), W),
    "Softmax, axis -1": lambda: model(one("Softmax"), W),
    "Softmax, opset 11": lambda: model(one("Softmax", axis=2), W, opset=11),
    "LogSoftmax": lambda: model(one("LogSoftmax", axis=1), W),
    "Concat twice": lambda: model(one("Concat", "a", axis=1), W),
    "Concat with a weight": lambda: model(one("Concat", "k", axis=0), W | {"k": normal(1, 4, 6, 6)}),
    "Add to itself": lambda: model(one("Add", "a"), W),
    "Mul by itself": lambda: model(one("Mul", "a"), W),
    "Sub of itself": lambda: model(one("Sub", "a"), W),
    "Mul by 0": lambda: model(one("Mul", "z"), W | {"z": f(0)}),
    "Div by tiny": lambda: model(one("Div", "z"), W | {"z": f(1e-3)}),
    "Pad, negative": lambda: model(one("Pad", "p"), W | {"p": c([0, 0, -1, 0, 0, 0, 0, -2])}),
    "Pad, reflect": lambda: model(one("Pad", "p", mode="reflect"), W | {"p": c([0, 0, 1, 2, 0, 0, 2, 1])}),
    "Pad with 3.3": lambda: model(one("Pad", "p", "v"), W | {"p": c([0, 0, 1, 1, 0, 0, 1, 1]), "v": f(3.3)}),
    "Resize, nearest": lambda: model(one("Resize", "", "s", mode="nearest"), W | {"s": f([1, 1, 2, 2])}),
    "Resize, linear": lambda: model(
        one("Resize", "", "", "to", mode="linear", coordinate_transformation_mode="align_corners"),
        W | {"to": c([4, 4, 9, 9])},
    ),
    "Split, uneven": lambda: model(
        [
            conv(target="a"),
            node("Split", ["a", "sizes"], ["p", "q"], axis=1),
            node("Concat", ["q", "p"], ["y"], axis=1),
        ],
        W | SPLIT,
    ),
    "Split to outputs": lambda: model(
        [conv(target="a"), node("Split", ["a", "sizes"], ["p", "y"], axis=1)], W | SPLIT, outputs=("p", "y")
    ),
    "BatchNormalization": lambda: model([batchnorm("x", "y", "bn")], statistics("bn", 4)),
    "BatchNormalization behind an output": lambda: model(
        [conv(target="a"), batchnorm("a", "y", "bn")], W | statistics("bn", 4), outputs=("a", "y")
    ),
    "Dropout": lambda: model(one("Dropout"), W),
    "Reshape to 0": lambda: model(one("Reshape", "to"), W | {"to": c([0, -1])}),
    "TopK": lambda: model(
        [conv(target="a"), node("TopK", ["a", "k"], ["y", "i"])], W | {"k": c([2])}, outputs=("y", "i")
    ),
    "ArgMax": lambda: model(one("ArgMax", axis=1, keepdims=0), W),
    "Cast there and back": lambda: model(
        [
            conv(target="a"),
            node("Cast", ["a"], ["i"], to=TensorProto.INT32),
            node("Cast", ["i"], ["y"], to=TensorProto.FLOAT),
        ],
        W,
    ),
    "Where": lambda: model(
        [conv(target="a"), node("Greater", ["a", "z"], ["m"]), node("Where", ["m", "a", "z"], ["y"])], W | {"z": f(0)}
    ),
    "PRelu": lambda: model(one("PRelu", "s"), W | {"s": normal(4, 1, 1)}),
    "Sqrt": lambda: model([conv(target="a"), node("Abs", ["a"], ["b"]), node("Sqrt", ["b"], ["y"])], W),
    # opsets
    **{
        f"opset {version}": (lambda version=version: old(version))
        for version in (7, 8, 9, 10, 11, 12, 13, 15, 16, 18, 19, 20, 21, 22, 23, NEWEST)
    },
    "opset 9, Upsample": lambda: old(9, node("Upsample", ["x", "s"], ["y"], mode="nearest"), s=f([1, 1, 2, 2])),
    "opset 10, Resize": lambda: old(10, node("Resize", ["x", "s"], ["y"], mode="nearest"), s=f([1, 1, 2, 2])),
    "opset 10, Slice": lambda: old(
        10, conv(target="a"), node("Slice", ["a", "lo", "hi"], ["y"]), w=W["w"], lo=c([0, 0]), hi=c([9, 2])
    ),
    "opset 2 Pad": lambda: old(10, node("Pad", ["x"], ["p"], pads=[0, 0, 1, 1, 0, 0, 1, 1]), conv("p", "y"), **W),
    # names
    **{
        f"name {text[:20]!r}": (
            lambda text=text: renamed(
                model([conv(target="a", b="b", **PADDED), node("Relu", ["a"], ["r"], name="n"), conv("r", "y")], W | B),
                {"a": text, "w": f"w{text}", "n": f"n{text}", "b": f"b {text}"},
            )
        )
        for text in ("with a space", "a/b/c", "名前", 'it\'s "quoted"', "a\\b", "[bold]", "%s {0}", "::", "-", LONG)
    },
    "names of ours": lambda: renamed(
        model(
            [
                conv(target="a", b="b", **PADDED),
                node("Relu", ["a"], ["r"], name="n"),
                conv("r", "q"),
                node("Sigmoid", ["q"], ["y"]),
            ],
            W | B,
        ),
        {
            "a": "x_DequantizeLinear_Output",
            "w": "w_quantized",
            "r": "x_scale",
            "b": "x_zero_point",
            "q": "y_QuantizeLinear_Input",
            "n": "x_QuantizeLinear",
        },
    ),
    "more names of ours": lambda: renamed(
        model([conv(target="a", b="b", **PADDED), node("Sigmoid", ["a"], ["r"], name="n"), conv("r", "y")], W | B),
        {"a": "w_quantized", "r": "w_scale", "b": "w_DequantizeLinear_Output", "n": "w_DequantizeLinear"},
    ),
}

# The ones of which formats other than XINT8's make something of their own.
OTHERS = (
    "no weights", "nothing to quantize", "only Gemm", "MatMul of activations", "input is an output too", "same names",
    "constant by shape", "output twice", "inner outputs", "loop", "function", "initializer as input",
    "whole numbers beside", "whole numbers alone", "weight shared", "bias shared", "weight is an output", "zero weights and bias",
    "huge bias", "tiny weights", "bias not constant", "scalar output", "Conv1d", "depthwise times 2", "ConvTranspose",
    "Gemm, transA", "Gemm, scalar C", "Gemm, alpha", "Pad with 3.3", "Where", "BatchNormalization", "LSTM", "opset 7",
    "names of ours",
)  # fmt: skip


@pytest.mark.parametrize("name", sampled(MODELS, 2))
def test_models_that_are_odd(name: str) -> None:
    works(MODELS[name]())


@pytest.mark.parametrize(
    ("name", "config"), sampled(itertools.product(OTHERS, ["A8W8", "BF16", "UINT8_DYNAMIC_QUANT"]), 4)
)
def test_models_that_are_odd_in_other_formats(name: str, config: str) -> None:
    works(MODELS[name](), config=config)


@pytest.mark.parametrize(
    "name",
    sampled(
        ["constant by shape", "scalar output", "Gemm, scalar C", "Pad with 3.3", "Where", "Conv1d", "names of ours"], 3
    ),
)
def test_scalars_have_no_blocks(name: str) -> None:
    result = works(MODELS[name](), config="BFP16", runs=False)  # its operators are AMD's own
    assert len(result.plan)
    assert all(result.graph.values[k].shape != () for k in result.plan)


@pytest.mark.parametrize("name", ["input is an output too", "weight is an output", "names of ours", "output twice"])
def test_odd_models_are_split_again(name: str) -> None:
    made = MODELS[name]()
    result, feeds = works(made), feeds_of(made)
    graph, plan = jq.split_quantizers(jq.load(result.model))
    again = jq.fake_quant(graph)(graph.params, plan, feeds)
    for key, want in jq.fake_quant(result.graph)(result.graph.params, result.plan, feeds).items():
        np.testing.assert_array_equal(again[key], want)


@pytest.mark.parametrize("format", ["qoperator", "vitis_qdq", "fix_neuron"])
@pytest.mark.parametrize(
    "name", ["names of ours", "same names", "input is an output too", "bias shared", "output twice"]
)
def test_models_that_are_odd_as_other_nodes(name: str, format: str) -> None:
    works(MODELS[name](), format=format, runs=format == "qoperator")


@pytest.mark.parametrize("opset", [13, 17, 21, NEWEST])
@pytest.mark.parametrize(
    "name", ["opset 7", "opset 9, Upsample", "opset 13", "opset 21", "subgraphs", "Softmax, opset 11"]
)
def test_opsets_that_are_asked_for(name: str, opset: int) -> None:
    made = MODELS[name]()
    try:
        found = works(made, opset=opset)
    except ConfigError as error:
        assert "cannot be converted" in str(error) and opset < max(made.opset_import[0].version, 13)
    else:
        assert found.model.opset_import[0].version == opset


def test_nothing_to_quantize_is_said() -> None:
    with pytest.warns(UserWarning, match="nothing is quantized"):
        jq.quantize(MODELS["nothing to quantize"](), IMAGES)


# ---------------------------------------------------------------------------------------------
# Options
# ---------------------------------------------------------------------------------------------

XINT8 = jq.presets["XINT8"]

BAD_OPTIONS: dict[str, tuple[dict[str, Any], type[Error], str]] = {
    "preset": ({"config": "XINT9"}, ConfigError, r"no preset 'XINT9'\. Did you mean 'XINT8'"),
    "no config": ({"config": None}, ConfigError, r"no preset None"),
    "number for a config": ({"config": 8}, ConfigError, r"no preset 8"),
    "excluded": (
        {"config": XINT8.replace(exclude=("conv_z",))},
        ConfigError,
        r"'conv_z' matches no node, by name or operator\. Did you mean 'conv_y'",
    ),
    "overridden": (
        {"config": XINT8.replace(overrides={"conv_z": {"method": "nonoverflow"}})},
        ConfigError,
        r"'conv_z' matches no node",
    ),
    "input nodes": ({"config": XINT8.replace(input_nodes=("conv_z",))}, ConfigError, r"no node 'conv_z'"),
    "output nodes": ({"config": XINT8.replace(output_nodes=("y",))}, ConfigError, r"no node 'y'"),
    "subgraph": (
        {"config": XINT8.replace(exclude_subgraphs=((("conv_y",), ("end",)),))},
        ConfigError,
        r"no node 'end'",
    ),
    "format": ({"format": "qqd"}, ConfigError, r"format needs one of qdq, .*got 'qqd'. Did you mean 'qdq'"),
    "no format": ({"format": None}, ConfigError, r"format needs one of .*got None"),
    "opset too low": ({"opset": 9}, ConfigError, r"opset 9: quantizers exist from 10 on"),
    "opset too high": ({"opset": 999}, ConfigError, r"opset 999: .* up to "),
    "opset of text": ({"opset": "17"}, ConfigError, r"opset '17'"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_options_that_are_refused(name: str) -> None:
    options, kind, match = BAD_OPTIONS[name]
    fails(kind, match, SMALL, **options)


@pytest.mark.parametrize("options", [{"format": "qqd"}, {"opset": 9}], ids=str)
def test_options_are_looked_at_before_the_data(options: dict[str, Any]) -> None:
    fails(ConfigError, "", SMALL, {"never": "looked at"}, **options)


def test_one_layer_is_finetuned() -> None:
    works(SMALL, config=XINT8.replace(finetune="adaround+block", finetune_steps=3))


def test_everything_excluded() -> None:
    result = works(SMALL, config=XINT8.replace(exclude=("Conv",)))
    assert [n.op_type for n in result.model.graph.node] == ["Conv"]


# ---------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(SMALL, path)
    return path


@pytest.fixture
def data_path(tmp_path: Path) -> Path:
    path = tmp_path / "data.npy"
    np.save(path, IMAGES)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def refused(model: Any, output: Any, match: str, folder: Path, data: Any = IMAGES) -> None:
    before = contents(folder)
    with pytest.raises(Error, match=match):
        jq.quantize(model, data, output=output)
    assert contents(folder) == before


def test_output_is_a_folder(tmp_path: Path) -> None:
    refused(SMALL, tmp_path, "is a folder; give the name of a file", tmp_path)


def test_output_is_below_a_file(model_path: Path, tmp_path: Path) -> None:
    refused(SMALL, model_path / "out.onnx", "model.onnx is not a folder that may be written to", tmp_path)


def test_output_in_a_folder_that_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    refused(SMALL, tmp_path / "out.onnx", "not a folder that may be written to", tmp_path)


def test_output_is_the_input(model_path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.onnx"
    link.symlink_to(model_path)
    for output in (model_path, link, tmp_path / "." / "model.onnx"):
        refused(model_path, output, "is the float model itself; give another name", tmp_path)


@pytest.mark.parametrize(
    "name", ["out", "out.bin", "new/folders/out.onnx", "with a space.onnx", "名前.onnx", "x" * 200]
)
def test_output_has_any_name(name: str, tmp_path: Path) -> None:
    result = jq.quantize(SMALL, IMAGES, output=tmp_path / name)
    assert list(contents(tmp_path)) == [name]
    assert onnx.load(tmp_path / name) == result.model


def test_output_has_a_name_that_cannot_be(tmp_path: Path) -> None:
    refused(SMALL, tmp_path / ("x" * 300 + ".onnx"), "File name too long", tmp_path)
    refused(SMALL, tmp_path / "a\0b.onnx", "null (byte|character)", tmp_path)
    refused(SMALL, 5, "the output 5 cannot be written", tmp_path)
    refused(SMALL, "", "is a folder", tmp_path)


def test_external_data_that_are_missing_or_short(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    made = model([conv()], {"w": normal(4, 4, 20, 20)}, x=("N", 4, 24, 24))
    onnx.save(made, path, save_as_external_data=True, location="weights.bin", size_threshold=16)
    whole = (tmp_path / "weights.bin").read_bytes()
    (tmp_path / "weights.bin").write_bytes(whole[:-100])
    refused(path, tmp_path / "out.onnx", r"'w'.*weights.bin", tmp_path, normal(2, 4, 24, 24))
    (tmp_path / "weights.bin").unlink()
    refused(path, tmp_path / "out.onnx", r"'w'.*weights.bin", tmp_path, normal(2, 4, 24, 24))


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=["full", "interrupt"]
)
@pytest.mark.parametrize("older", [True, False])
def test_a_write_that_fails_midway(
    error: BaseException, older: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if older:
        (tmp_path / "out.onnx").write_bytes(OLDER)

    def write_half(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise error

    monkeypatch.setattr(Path, "write_bytes", write_half)
    kind, match = (
        (ModelError, "cannot write the model .*: No space left")
        if isinstance(error, OSError)
        else (KeyboardInterrupt, "")
    )
    with pytest.raises(kind, match=match):
        jq.quantize(SMALL, IMAGES, output=tmp_path / "out.onnx")
    assert contents(tmp_path) == ({"out.onnx": OLDER} if older else {})


def test_a_checker_that_refuses_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: Any) -> None:
        raise ModelError("onnx's checker refuses the model: no")

    (tmp_path / "out.onnx").write_bytes(OLDER)
    monkeypatch.setattr("jq.graph.write.check_model", refuse)
    refused(SMALL, tmp_path / "out.onnx", "checker refuses", tmp_path)


# ---------------------------------------------------------------------------------------------
# The command line
# ---------------------------------------------------------------------------------------------


def run(capfd: pytest.CaptureFixture[str], *argv: Any) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main([str(a) for a in argv])
    out, err = capfd.readouterr()
    return int(caught.value.code or 0), out, err


SETTINGS = {
    "metod=minmse": r"no option 'metod'\. Did you mean 'method'",
    "method": r"--set needs the form NAME=VALUE; got 'method'",
    "method=best": r"method needs one of minmse, .*; got 'best'",
    "method=7": r"method needs .*; got 7",
    "batch=0": r"batch needs a whole number at least 1, at most .*; got 0",
    "batch=1.5": r"batch needs a whole number .*; got 1.5",
    "batch=many": r"batch needs .*; got 'many'",
    "batch=true": r"batch needs .*; got True",
    "percentile=200": r"percentile needs a number above 0, at most 100; got 200",
    "percentile=NaN": r"percentile",
    "bins=-1": r"bins needs .*; got -1",
    "activation=int3": r"int3",
    "activation=5": r"5",
    "activation=null": r"None",
    "activation=[1]": r"1",
    "weight=": r"format needs one of .*got ''",
    "exclude=nope": r"'nope' matches no node, by name or operator",
    'exclude=["nope"]': r"'nope' matches no node, by name or operator",
    "overrides=5": r"overrides",
    "overrides=[1]": r"overrides",
    'overrides={"conv_y": 3}': r"overrides",
    'overrides={"conv_y": {"batch": 3}}': r"an override has no option 'batch'",
    'overrides={"conv_y": {"method": "best"}}': r"the override of 'conv_y': method needs .*; got 'best'",
    "op_types=5": r"op_types needs a tuple of names, or None; got 5",
    "forms=x": r"forms",
    "forms=5": r"forms",
    "rewrites=[1]": r"rewrites",
    "constraints=true": r"constraints",
    "percentiles=[]": r"percentiles",
    "moving_average=2": r"moving_average needs a number above 0, at most 1, or None; got 2",
    "finetune=x": r"finetune needs None, or stages with \+ between: bias, adaround, .*; got 'x'",
    "finetune=adaround+": r"finetune needs .*; got 'adaround\+'",
    "finetune_steps=0": r"finetune_steps needs a whole number at least 1, or None; got 0",
    "finetune_rate=-1": r"finetune_rate needs a number above 0",
    "finetune_batch=0": r"finetune_batch",
    "finetune_drop=2": r"finetune_drop",
    "scale=float": r"scale='float'",
    "symmetric=1": r"symmetric needs True or False; got 1",
    "cle=perhaps": r"cle needs .*; got 'perhaps'",
    "exclude_subgraphs=[[1]]": r"exclude_subgraphs",
    'input_nodes=["nope"]': r"no node 'nope'",
}


def command_fails(capfd: pytest.CaptureFixture[str], match: str, folder: Path, *argv: Any) -> None:
    """Exit code 2, one line on stderr, nothing on stdout, and no file."""
    before = contents(folder)
    code, out, err = run(capfd, "quantize", *argv)
    lines = [line for line in err.splitlines() if not line.startswith("warning: ")]
    assert (code, out, len(lines)) == (2, "", 1)
    assert re.match(f"error: .*{match}", lines[0])
    assert contents(folder) == before


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_that_are_refused(
    setting: str, model_path: Path, data_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command_fails(capfd, SETTINGS[setting], model_path.parent, model_path, "--data", data_path, "--set", setting)


CONFIGS = {
    "not json": ("{", "is not JSON"),
    "empty": ("", "is not JSON"),
    "binary": ("\0\x01", "is not JSON"),
    "list": ("[1]", "needs options by name; got a list"),
    "unknown": ('{"metod": "minmse"}', "no option 'metod'"),
    "wrong": ('{"batch": "many"}', "batch needs .*; got 'many'"),
    "null": ("null", "needs options by name; got a NoneType"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config_files_that_are_refused(name: str, model_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text, match = CONFIGS[name]
    config = model_path.with_name("config.json")
    config.write_text(text)
    command_fails(capfd, match, model_path.parent, model_path, "--config", config)


def test_config_file_of_bytes(model_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = model_path.with_name("config.json")
    config.write_bytes(b"\xff\xfe{}")
    command_fails(capfd, "is not JSON", model_path.parent, model_path, "--config", config)


@pytest.mark.parametrize(
    ("argv", "match"),
    [
        (["MODEL", "--config", "none.json"], "cannot read none.json: No such file"),
        (["MODEL", "--config", "XINT9"], "no preset 'XINT9'"),
        (["MODEL", "--format", "qqd"], "got 'qqd'"),
        (["MODEL", "--opset", "3"], "opset 3"),
        (["MODEL", "--report", "report.pdf"], r"--report needs a name that ends in .*; got report.pdf"),
        (["MODEL", "--report", "FOLDER/data.npy/report.html"], "cannot be written"),
        (["MODEL", "--data", "FOLDER/none.npz"], "cannot read .*none.npz: No such file"),
        (["MODEL", "--data", "MODEL"], "cannot read .*model.onnx"),
        (["MODEL", "--data", "FOLDER/empty"], "holds neither arrays nor images"),
        (["MODEL", "--output", "FOLDER"], "is a folder"),
        (["MODEL", "--output", "MODEL"], "--output is .*, which is read as well; give another name"),
        (["FOLDER/none.onnx"], "cannot read the model .*none.onnx: No such file"),
        (["FOLDER"], "cannot read the model .*: Is a directory"),
        (["FOLDER/data.npy"], "not an ONNX model"),
    ],
    ids=lambda v: " ".join(v)[:60] if isinstance(v, list) else "",
)
def test_commands_that_are_refused(
    argv: list[str], match: str, model_path: Path, data_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = model_path.parent
    (folder / "empty").mkdir()
    given = [a.replace("MODEL", str(model_path)).replace("FOLDER", str(folder)) for a in argv]
    command_fails(capfd, match, folder, *given)


def test_a_report_on_a_full_disk(
    model_path: Path, data_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = model_path.with_name("report.html")
    report.write_bytes(OLDER)
    replace = os.replace

    def full(draft: Path, target: Path) -> None:
        if "report" in Path(target).name:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(draft, target)

    monkeypatch.setattr(os, "replace", full)
    code, out, err = run(capfd, "quantize", model_path, "--data", data_path, "--report", report)
    assert (code, out) == (2, "")
    assert re.match("error: cannot write .*report.html: No space left on device", err)
    assert report.read_bytes() == OLDER
    assert sorted(contents(model_path.parent)) == ["data.npy", "model.onnx", "model_xint8.onnx", "report.html"]


def test_an_interrupted_command(
    model_path: Path, data_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stop)
    before = contents(model_path.parent)
    assert run(capfd, "quantize", model_path, "--data", data_path) == (130, "", "interrupted\n")
    assert contents(model_path.parent) == before


def test_a_command_that_works(model_path: Path, data_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = model_path.with_name("mine.json")
    config.write_text(json.dumps(XINT8.replace(method="nonoverflow").to_dict()))
    code, out, err = run(capfd, "quantize", model_path, "--data", data_path, "--config", config, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)
    feeds = {"x": IMAGES}
    onnxruntime_on(model_path.with_name("model_mine.onnx"), feeds)


def test_a_file_above_what_protobuf_reads_is_refused_unread(tmp_path):
    path = tmp_path / "large.onnx"
    with path.open("wb") as file:
        file.truncate(5 << 29)  # of which the disk holds nothing
    with pytest.raises(jq.ModelError, match=r"has 2\.7 GB, and one file of ONNX's format holds at most 2 GB"):
        jq.load(path)
