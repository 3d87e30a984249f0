"""Hostile and broken files: one clear line, from Python and on the command line."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from jq.cli import main
from jq.errors import Error, ModelError, UnsupportedOp
from jq.evidence.inspection import inspect
from jq.graph.read import load
from jq.readings.diagnosis import blames_model
from jq.readings.tracing import trace

Case = Callable[[Path], Path]


def model(
    nodes: list[onnx.NodeProto] | None = None,
    *,
    initializers: tuple[TensorProto, ...] = (),
    shape: tuple[int | str, ...] = (2, 3),
    inputs: tuple[str, ...] = ("x",),
    opset: int = 17,
    functions: tuple[onnx.FunctionProto, ...] = (),
    domains: tuple[str, ...] = (),
) -> onnx.ModelProto:
    """A model with input x and output y; by default y = Relu(x)."""
    graph = helper.make_graph(
        nodes or [helper.make_node("Relu", ["x"], ["y"], name="act")],
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in inputs],
        [onnx.ValueInfoProto(name="y")],
        list(initializers),
    )
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=functions)


def add_w(**tensor: object) -> onnx.ModelProto:
    """y = x + w, with w's proto as given."""
    proto = TensorProto(name="w", **{"data_type": TensorProto.FLOAT, "dims": [3], **tensor})
    return model([helper.make_node("Add", ["x", "w"], ["y"], name="sum")], initializers=(proto,))


def external(location: str, **entries: object) -> onnx.ModelProto:
    found = add_w(data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **entries}.items():
        found.graph.initializer[0].external_data.add(key=key, value=str(value))
    return found


def written(made: onnx.ModelProto | bytes, files: tuple[str, ...] = ()) -> Case:
    def write(folder: Path) -> Path:
        path = folder / "inner" / "model.onnx"
        path.parent.mkdir()
        path.write_bytes(made if isinstance(made, bytes) else made.SerializeToString())
        for name in files:
            (path.parent / name).write_bytes(bytes(12))
        return path

    return write


def symlinked(folder: Path) -> Path:
    path = written(external("w.bin"))(folder)
    (folder / "secret").write_bytes(bytes(12))
    (path.parent / "w.bin").symlink_to(folder / "secret")
    return path


def directory(folder: Path) -> Path:
    return folder


def subgraph_without_source() -> onnx.ModelProto:
    branch = helper.make_graph(
        [helper.make_node("Neg", ["ghost"], ["z"], name="inner")], "b", [], [onnx.ValueInfoProto(name="z")]
    )
    node = helper.make_node("If", ["c"], ["y"], name="choice", then_branch=branch, else_branch=branch)
    return model([node], initializers=(numpy_helper.from_array(np.array(True), "c"),))


def doubling(levels: int) -> onnx.ModelProto:
    """A few kilobytes of local functions that stand for 2**levels nodes."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    functions = []
    for level in range(levels):
        call = ("Relu", "") if level == 0 else (f"f{level - 1}", "f")
        body = [helper.make_node(call[0], [a], [b], domain=call[1]) for a, b in (("a", "b"), ("b", "c"))]
        functions.append(helper.make_function("f", f"f{level}", ["a"], ["c"], body, opsets))
    node = helper.make_node(f"f{levels - 1}", ["x"], ["y"], domain="f")
    return model([node], functions=tuple(functions), domains=("f",))


def recursive() -> onnx.ModelProto:
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    body = [helper.make_node("again", ["a"], ["b"], domain="f")]
    function = helper.make_function("f", "again", ["a"], ["b"], body, opsets)
    return model([helper.make_node("again", ["x"], ["y"], domain="f")], functions=(function,), domains=("f",))


def sparse(dims: list[int], indices: list[int]) -> onnx.ModelProto:
    made = model([helper.make_node("Add", ["x", "w"], ["y"])])
    values = numpy_helper.from_array(np.ones(len(indices), np.float32), "w")
    made.graph.sparse_initializer.append(
        onnx.SparseTensorProto(values=values, indices=numpy_helper.from_array(np.array(indices), "i"), dims=dims)
    )
    return made


def with_metadata() -> bytes:
    made = model()
    helper.set_model_props(made, {"note": "MARK"})
    return made.SerializeToString().replace(b"MARK", b"\xffARK")


def outside_a_function() -> onnx.ModelProto:
    made = model([helper.make_node("LeakyRelu", ["x"], ["y"], name="act", alpha=0.1)])
    made.graph.node[0].attribute[0].ref_attr_name = "slope"
    return made


def long_names() -> onnx.ModelProto:
    return model([helper.make_node("Abs", ["n" * 70000], ["y"], name="m" * 70000)])


def nested(levels: int) -> onnx.ModelProto:
    """An If in a branch of an If, and so on."""
    made = model()
    for _ in range(levels - 1):
        one, other = (
            helper.make_graph(m.graph.node, "b", [], [onnx.ValueInfoProto(name="y")]) for m in (made, model())
        )
        node = helper.make_node("If", ["c"], ["y"], then_branch=one, else_branch=other)
        made = model([node], initializers=(numpy_helper.from_array(np.array(True), "c"),))
    return made


def several_sparse(count: int) -> onnx.ModelProto:
    """Some sparse tensors of 64 MB each."""
    made = sparse([1 << 24], [0])
    for index in range(1, count):
        other = made.graph.sparse_initializer.add()
        other.CopyFrom(made.graph.sparse_initializer[0])
        other.values.name = f"w{index}"
    return made


def shaped_by(op_type: str, shape: list[int], **attrs: object) -> onnx.ModelProto:
    """A node whose constant operand asks for this shape."""
    source = [] if op_type == "ConstantOfShape" else ["x"]
    node = helper.make_node(op_type, [*source, "s"], ["y"], name="huge", **attrs)
    return model([node], initializers=(numpy_helper.from_array(np.array(shape, np.int64), "s"),), shape=(1, 1))


RELU = model().SerializeToString()
TWICE = [helper.make_node("Relu", ["x"], ["y"], name="one"), helper.make_node("Abs", ["x"], ["y"], name="two")]
CYCLE = [helper.make_node("Add", ["x", "b"], ["a"], name="one"), helper.make_node("Abs", ["a"], ["b"], name="two")]
ZEROS = numpy_helper.from_array(np.zeros(3, np.float32), "w")

# What is written, and what the one line must say.
CASES: dict[str, tuple[Case, str]] = {
    "not onnx": (written(b"#!/bin/sh\necho hello\n"), "not an ONNX model"),
    "empty file": (written(b""), "not an ONNX model"),
    "truncated": (written(RELU[: len(RELU) // 2]), "not an ONNX model|truncated"),
    "no such file": (lambda folder: folder / "nope.onnx", "cannot read the model .*nope.onnx"),
    "directory": (directory, "cannot read the model"),
    "cyclic": (written(model([*CYCLE, helper.make_node("Abs", ["b"], ["y"])])), "cyclic.*'one'"),
    "reads itself": (written(model([helper.make_node("Add", ["x", "y"], ["y"], name="self")])), "cyclic.*'self'"),
    "missing initializer": (
        written(model([helper.make_node("Add", ["x", "w"], ["y"], name="sum")])),
        "'sum'.*reads 'w'",
    ),
    "missing in subgraph": (written(subgraph_without_source()), "'inner'.*reads 'ghost'"),
    "no producer of output": (
        written(model([helper.make_node("Abs", ["x"], ["z"])])),
        "no node produces graph output 'y'",
    ),
    "output twice": (written(model(TWICE)), "'two'.*'y' is defined twice"),
    "initializer twice": (written(model(initializers=(ZEROS, ZEROS))), "'w' is defined twice"),
    "input twice": (written(model(inputs=("x", "x"))), "'x' is defined twice"),
    "opset 999": (written(model(opset=999)), "opset 999 is outside"),
    "opset -1": (written(model(opset=-1)), "opset -1 is outside"),
    "outside": (written(external("../../x")), r"'w'.*'../../x' is outside the model's folder; refused"),
    "outside by absolute path": (
        written(external("/etc/passwd")),
        "'w'.*'/etc/passwd' is outside the model's folder; refused",
    ),
    "outside by symlink": (symlinked, "'w'.*'w.bin' is outside the model's folder; refused"),
    "external folder": (written(external(".")), "'w'"),
    "external missing": (written(external("w.bin")), "'w'.*w.bin"),
    "external null byte": (written(external("a\0b")), "'w'"),
    "external offset": (written(external("w.bin", offset=8), ("w.bin",)), "'w' needs 12 bytes.*at offset 8 of 12"),
    "external negative offset": (written(external("w.bin", offset=-4), ("w.bin",)), "'w' needs 12 bytes"),
    "external length": (written(external("w.bin", length=99), ("w.bin",)), "'w' needs 12 bytes.*declares 99"),
    "external no number": (written(external("w.bin", offset="zero"), ("w.bin",)), "'w'.*zero"),
    "fewer bytes than declared": (written(add_w(raw_data=bytes(8))), r"'w'.*\(3,\).*needs 12 bytes; the file holds 8"),
    "more bytes than declared": (written(add_w(raw_data=bytes(16))), "'w'.*needs 12 bytes; the file holds 16"),
    "fewer values than declared": (written(add_w(float_data=[1.0])), "'w'"),
    "int4 size": (
        written(add_w(data_type=TensorProto.INT4, raw_data=bytes(3))),
        "'w'.*needs 2 bytes; the file holds 3",
    ),
    "no values": (written(add_w()), "'w'"),
    "unknown type": (written(add_w(data_type=99, raw_data=bytes(12))), "'w' has the unknown element type 99"),
    "negative dim": (written(add_w(dims=[-3], raw_data=bytes(12))), r"'w' declares the impossible shape \(-3,\)"),
    "terabytes": (written(add_w(dims=[1 << 20, 1 << 20], raw_data=bytes(12))), "'w' declares the impossible shape"),
    "overflowing dims": (
        written(add_w(dims=[1 << 62, 1 << 62], raw_data=bytes(12))),
        "'w' declares the impossible shape",
    ),
    "empty with a vast dim": (written(add_w(dims=[0, 1 << 62])), "'w'"),
    "attribute of another type": (
        written(model([helper.make_node("MaxPool", ["x"], ["y"], name="pool", kernel_shape=2.5)])),
        "'pool'.*MaxPool.*'kernel_shape' is of type FLOAT; expected INTS",
    ),
    "attribute of a vendor's operator": (
        written(
            model(
                [helper.make_node("QuantizeLinear", ["x", "x", "x"], ["y"], name="q", domain="com.microsoft", axis="a")]
            )
        ),
        "'q'.*'axis' is of type STRING; expected INT",
    ),
    "switch that is neither": (
        written(model([helper.make_node("ReduceSum", ["x"], ["y"], name="sum", keepdims=-1)])),
        "'sum'.*ReduceSum.*'keepdims' is -1; expected 0 or 1",
    ),
    "constant that is a graph": (
        written(model([helper.make_node("Constant", [], ["y"], name="c", value=model().graph)])),
        "'c'.*'value' is of type GRAPH; expected TENSOR",
    ),
    "attribute of no function": (written(outside_a_function()), "'act'.*'alpha' refers to.*'slope'"),
    "metadata that are no text": (written(with_metadata()), "metadata entry b'.xffARK' is not UTF-8"),
    "names of many characters": (written(long_names()), r"mmm \.\.\. .*node output$"),
    "graphs that nest deep": (written(nested(20)), "subgraphs are nested 20 deep.*at most 16"),
    "sparse by their sum": (written(several_sparse(5)), "sparse tensor 'w4'.*0.3 GB"),
    "sparse terabytes": (written(sparse([1 << 36], [0])), "'w'"),
    "sparse index": (written(sparse([3], [7])), "'w'.*7"),
    "input of terabytes": (written(model(shape=(1 << 20, 1 << 20))), "'x' declares the impossible shape"),
    "expand to terabytes": (written(shaped_by("Expand", [1 << 20, 1 << 20])), "'huge'.*Expand"),
    "fill terabytes": (written(shaped_by("ConstantOfShape", [1 << 20, 1 << 20])), "'huge'.*ConstantOfShape"),
    "fill more than this machine has": (
        written(shaped_by("ConstantOfShape", [1 << 18, 1 << 17])),
        "'huge'.*ConstantOfShape",
    ),
    "shapes do not fit": (written(add_w(dims=[5], raw_data=bytes(20))), r"'sum'.*\[2, 3\].*\[5\]"),
    "functions that double": (written(doubling(40)), "function"),
    "function that calls itself": (written(recursive()), "function"),
}


@pytest.mark.parametrize("name", CASES)
def test_one_line_from_python(name: str, tmp_path: Path) -> None:
    case, line = CASES[name]
    path = case(tmp_path)
    with pytest.raises(Error, match=line) as caught:
        trace(load(path))
        inspect(load(path))  # evaluates the shapes
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("name", CASES)
def test_one_line_on_the_command_line(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    case, line = CASES[name]
    with pytest.raises(SystemExit) as caught:
        main(["inspect", str(case(tmp_path))])
    out, err = capfd.readouterr()
    assert caught.value.code == 2
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    assert re.search(line, err)


def test_unknown_op_is_named_with_its_domain_and_node(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = model([helper.make_node("Magic", ["x"], ["y"], name="wand", domain="com.acme")], domains=("com.acme",))
    path = written(made)(tmp_path)
    with pytest.raises(UnsupportedOp, match=r"com\.acme::Magic.*'wand'"):
        trace(load(path))
    with pytest.raises(SystemExit) as caught:
        main(["inspect", str(path)])
    assert caught.value.code == 2
    told = capfd.readouterr()  # inspect shows what it can as well
    assert told.err.count("\n") == 1 and "com.acme::Magic" in told.err and "com.acme::Magic" in told.out


def test_every_unknown_op_is_listed() -> None:
    nodes = [helper.make_node("A", ["x"], ["z"], domain="d"), helper.make_node("B", ["z"], ["y"], domain="d")]
    with pytest.raises(UnsupportedOp, match=r"d::A.*d::B"):
        trace(load(model(nodes, domains=("d",))))


def test_external_data_inside_the_folder_is_read(tmp_path: Path) -> None:
    path = written(external("w.bin", offset=0, length=12), ("w.bin",))(tmp_path)
    np.testing.assert_array_equal(load(path).params["w"], np.zeros(3, np.float32))


def test_external_data_need_a_path() -> None:
    with pytest.raises(ModelError, match=r"'w'.*load the model by its path"):
        load(external("w.bin"))


def test_path_with_a_null_byte() -> None:
    with pytest.raises(ModelError, match="cannot read"):
        load("a\0b")


def test_reading_an_output_that_the_operator_does_not_give() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a", "b"], name="act"),
        helper.make_node("Abs", ["b"], ["y"], name="reader"),
    ]
    with pytest.raises(ModelError, match=r"'act' \(Relu, opset 17\) has 2 outputs; the operator has at most 1"):
        load(model(nodes))
    vendor = [helper.make_node("Gelu", ["x"], ["a", "b"], domain="com.microsoft"), nodes[1]]  # without a schema
    graph = load(model(vendor, domains=("com.microsoft",)))
    with pytest.raises(ModelError, match=r"'b' has no value"):
        trace(graph)(graph.params, {"x": np.zeros((2, 3), np.float32)})


@pytest.mark.parametrize(
    ("inputs", "line"),
    [
        (["x"], "has 1 inputs; the operator has at least 2"),
        (["x"] * 4, "has 4 inputs; the operator has at most 3"),
        (["x", "x", "", ""], ""),
    ],
)
def test_number_of_inputs(inputs: list[str], line: str) -> None:
    made = model([helper.make_node("Conv", inputs, ["y"], name="conv")])
    if not line:  # trailing ones may be left empty
        assert load(made).nodes[0].label == "conv"
    else:
        with pytest.raises(ModelError, match=rf"'conv' \(Conv, opset 17\) {line}"):
            load(made)


def test_names_that_are_not_utf8() -> None:
    data = model([helper.make_node("Relu", ["x"], ["y"], name="MARK")]).SerializeToString()
    with pytest.raises(ModelError, match=r"the name b'\\xffARK' is not UTF-8"):
        load(data.replace(b"MARK", b"\xffARK"))


def test_a_shape_of_two_billion_dims_does_not_keep_inference_busy() -> None:
    made = model([helper.make_node("Expand", ["x", "s"], ["y"])])
    made.graph.input.append(helper.make_tensor_value_info("s", TensorProto.INT64, [(1 << 31) - 1]))
    assert load(made).values["s"].shape == ((1 << 31) - 1,)


def test_long_vectors_are_not_propagated_as_shapes() -> None:
    nodes = [
        helper.make_node("Range", ["a", "b", "c"], ["r"]), helper.make_node("Cast", ["r"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["x"], ["g"], to=TensorProto.INT64), helper.make_node("Add", ["f", "x"], ["y"]),
    ]  # fmt: skip
    ends = tuple(numpy_helper.from_array(np.array(v), k) for k, v in (("a", 0), ("b", 10**9), ("c", 1)))
    assert load(model(nodes, initializers=ends, shape=(1,))).values["g"].dtype == np.int64


def test_repeated_values_are_bounded_by_their_sum() -> None:
    shape = numpy_helper.from_array(np.array([1 << 22]), "s")  # of float64 32 MB each
    value = numpy_helper.from_array(np.zeros(1), "v")
    nodes = [helper.make_node("ConstantOfShape", ["s"], [f"c{i}"], value=value) for i in range(20)]
    graph = load(model([*nodes, helper.make_node("Sum", [f"c{i}" for i in range(20)], ["y"])], initializers=(shape,)))
    assert sum(a.nbytes for a in graph.params.values()) == 256 << 20
    assert [n.op_type for n in graph.nodes].count("ConstantOfShape") == 12  # are made when they are read


def test_what_is_filled_at_load_does_not_raise_the_bound() -> None:
    """Four hundred fills of 16 MB: the first sixteen are weights, 256 times which would be 64 GB."""
    shape = numpy_helper.from_array(np.array([1 << 22]), "s")
    nodes = [helper.make_node("ConstantOfShape", ["s"], [f"c{i}"]) for i in range(400)]
    nodes.append(helper.make_node("Sum", ["x", *(f"c{i}" for i in range(400))], ["y"]))
    graph = load(model(nodes, initializers=(shape,), shape=(1,)))
    with pytest.raises(ModelError, match=r"values in use would take 1\.1 GB"):
        trace(graph)(graph.params, {"x": np.zeros(1, np.float32)})


def test_values_are_bounded_by_what_is_in_use_together() -> None:
    """Each tensor of 128 MB is small enough; twenty of them at once are not, and one after the other are."""
    shape = numpy_helper.from_array(np.array([1 << 25]), "s")
    value = numpy_helper.from_array(np.zeros(1, np.float32), "v")
    nodes = [helper.make_node("ConstantOfShape", ["s"], [f"c{i}"], value=value) for i in range(20)]
    nodes.append(helper.make_node("Sum", ["x", *(f"c{i}" for i in range(20))], ["y"]))
    graph = load(model(nodes, initializers=(shape,), shape=(1,)))
    with pytest.raises(ModelError, match=r"values in use would take 1\.2 GB"):
        trace(graph)(graph.params, {"x": np.zeros(1, np.float32)})
    chain = [helper.make_node("Expand", ["x", "s"], ["c0"])]
    chain += [helper.make_node("Neg", [f"c{i}"], [f"c{i + 1}"]) for i in range(20)]
    chain.append(helper.make_node("ReduceMean", ["c20"], ["y"]))
    graph = load(model(chain, initializers=(shape,), shape=(1,)))
    jax.eval_shape(trace(graph), graph.params, {"x": np.zeros(1, np.float32)})


def test_a_failure_is_the_models_or_a_defect() -> None:
    @blames_model
    def broken(graph: object) -> None:
        raise KeyError("a defect")

    bad = model([helper.make_node("MatMul", ["x", "w"], ["y"], name="product")], initializers=(ZEROS,), shape=(2, 5))
    with pytest.raises(ModelError, match="'product'") as caught:
        broken(load(bad))
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(KeyError, match="a defect"):
        broken(load(model()))


def test_groups_that_do_not_fit_are_refused_at_once() -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="conv", group=1 << 24)  # a loop over them would take hours
    weight = numpy_helper.from_array(np.zeros((4, 3, 1, 1), np.float32), "w")
    with pytest.raises(ModelError, match=r"'conv'.*3 channels in 16777216 groups"):
        inspect(load(model([node], initializers=(weight,), shape=(1, 3, 4, 4))))


def test_sequences_are_described() -> None:
    nodes = [
        helper.make_node("SequenceConstruct", ["x", "x"], ["s"]),
        helper.make_node("SequenceAt", ["s", "i"], ["y"], name="at"),
    ]
    made = model(nodes, initializers=(numpy_helper.from_array(np.array(7), "i"),))
    with pytest.raises(ModelError, match=r"'at'.*s: sequence of 2"):
        inspect(load(made))


def test_a_constant_through_a_convolution_may_decide_a_shape() -> None:
    nodes = [
        helper.make_node("Conv", ["c", "w"], ["a"]),
        helper.make_node("Cast", ["a"], ["b"], to=TensorProto.INT64),
        helper.make_node("Reshape", ["b", "flat"], ["shape"]),
        helper.make_node("Expand", ["x", "shape"], ["y"]),
    ]
    arrays = {"c": np.full((1, 1, 2), 2, np.float32), "w": np.ones((1, 1, 1), np.float32), "flat": np.array([-1])}
    graph = load(
        model(nodes, initializers=tuple(numpy_helper.from_array(a, k) for k, a in arrays.items()), shape=(1, 1))
    )
    assert trace(graph)(graph.params, {"x": np.zeros((1, 1), np.float32)})["y"].shape == (2, 2)


def test_negative_repeats() -> None:
    with pytest.raises(ModelError, match=r"'huge' \(Tile"):
        inspect(load(shaped_by("Tile", [1, -4])))


def test_endless_reflection() -> None:
    node = helper.make_node("Pad", ["x", "p"], ["y"], name="pad", mode="reflect")
    pads = numpy_helper.from_array(np.array([0, 1 << 31, 0, 0]), "p")
    with pytest.raises(ModelError, match=r"'pad'.*repeat the shape"):
        inspect(load(model([node], initializers=(pads,))))


@pytest.mark.parametrize(
    "attrs", [{"pads": [1 << 31, 0, 0, 0]}, {"dilations": [1 << 62, 1]}, {"strides": [1, 1 << 40]}]
)
@pytest.mark.parametrize("op", ["Conv", "AveragePool", "MaxPool"])
def test_windows_larger_than_any_image(op: str, attrs: dict[str, list[int]]) -> None:
    inputs = ["x", "w"] if op == "Conv" else ["x"]
    node = helper.make_node(op, inputs, ["y"], name="window", kernel_shape=[2, 2], **attrs)
    weight = numpy_helper.from_array(np.zeros((4, 3, 2, 2), np.float32), "w")
    made = model([node], initializers=(weight,), shape=(1, 3, 4, 4), opset=19)
    with pytest.raises(ModelError, match=r"'window'.*larger than any image"):
        graph = load(made)
        trace(graph)(graph.params, {"x": np.zeros((1, 3, 4, 4), np.float32)})


@pytest.mark.parametrize("bits", [0, 33, 1 << 40])
def test_bits_that_float32_does_not_hold(bits: int) -> None:
    node = helper.make_node("FixNeuron", ["x"], ["y"], name="fix", domain="ai.onnx.contrib", bit_width=bits)
    graph = load(model([node], domains=("ai.onnx.contrib",)))
    with pytest.raises(UnsupportedOp, match=rf"'fix'.*bit_width is {bits}; expected 1 to 32"):
        trace(graph)(graph.params, {"x": np.zeros((2, 3), np.float32)})


def test_a_shape_of_more_dims_than_numpy_has() -> None:
    with pytest.raises(ModelError, match=r"'huge' \(ConstantOfShape"):
        inspect(load(shaped_by("ConstantOfShape", [1] * 200)))


GROWING: list[tuple[str, list[np.ndarray], dict[str, object]]] = [
    ("Range", [np.array(0), np.array(1 << 31), np.array(1)], {}),
    ("Tile", [np.array([1]), np.array([1 << 31])], {}),
    ("Pad", [np.array([1]), np.array([0, 1 << 31])], {}),
    ("OneHot", [np.zeros(4, np.int64), np.array(1 << 29), np.zeros(2, np.float32)], {}),
    ("Expand", [np.array([1]), np.array([1 << 31])], {}),
]


@pytest.mark.parametrize(("op", "arrays", "attrs"), GROWING, ids=[op for op, *_ in GROWING])
def test_known_tensors_do_not_grow_beyond_belief(op: str, arrays: list[np.ndarray], attrs: dict[str, object]) -> None:
    names = [f"c{i}" for i in range(len(arrays))]
    node = helper.make_node(op, names, ["y"], name="huge", **attrs)
    graph = load(
        model([node], initializers=tuple(numpy_helper.from_array(a, n) for n, a in zip(names, arrays, strict=True)))
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelError, match=rf"'huge' \({op}.*out of all proportion"):
        inspect(graph)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


def test_attribute_without_a_type() -> None:
    made = model([helper.make_node("LeakyRelu", ["x"], ["y"], name="act", alpha=0.5)])
    made.graph.node[0].attribute[0].ClearField("type")
    with pytest.raises(ModelError, match="'alpha' has no type"):
        load(made)


def test_operators_are_printable() -> None:
    with pytest.raises(ModelError, match=r"'act' has the operator 'Re\\nlu'"):
        load(model([helper.make_node("Re\nlu", ["x"], ["y"], name="act")]))


def test_output_without_a_name() -> None:
    made = model()
    made.graph.output[0].name = ""
    with pytest.raises(ModelError, match="no name"):
        load(made)
