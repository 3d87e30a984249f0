"""ONNX in and out: structure, arrays, external data, subgraphs, inferred shapes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import jq
from tests.conftest import one_node, onnxruntime_outputs


@pytest.mark.parametrize(
    ("opsets", "version"),
    [
        ({"": 2}, 8),
        ({"": 17}, 8),
        ({"": 21}, 10),
        ({"": 17, "ai.onnx.contrib": 1}, 8),
        ({"": 17, "com.microsoft": 1}, 8),
    ],
)
def test_no_newer_ir_than_the_opset_needs(opsets: dict[str, int], version: int) -> None:
    graph = jq.load(one_node("Relu", {"x": np.ones(2, np.float32)})).replace(opsets=opsets)
    assert jq.to_model(graph).ir_version == version


def conv_model(rng: np.random.Generator) -> onnx.ModelProto:
    return one_node(
        "Conv",
        {"x": rng.standard_normal((1, 3, 8, 8), np.float32)},
        initializers={"w": rng.standard_normal((64, 3, 5, 5), np.float32)},
    )


def test_path_bytes_and_proto_give_the_same_graph(tmp_path, rng):
    model = conv_model(rng)
    onnx.save(model, tmp_path / "m.onnx")
    graphs = [
        jq.load(tmp_path / "m.onnx"),
        jq.load(str(tmp_path / "m.onnx")),
        jq.load(model.SerializeToString()),
        jq.load(model),
    ]
    for graph in graphs:
        assert [n.op_type for n in graph.nodes] == ["Conv"]
        np.testing.assert_array_equal(graph.params["w"], graphs[0].params["w"])


@pytest.mark.parametrize("name", jq.zoo.models())
def test_written_models_compute_the_same(tmp_path, name):
    graph = jq.load(jq.zoo.path(name))
    jq.save(graph, tmp_path / "again.onnx")
    onnx.checker.check_model(onnx.load(tmp_path / "again.onnx"), full_check=True)
    x = {"input": jq.zoo.evaluation_set()[0][:2]}
    (want,) = onnxruntime_outputs(onnx.load(jq.zoo.path(name)), x)
    (got,) = onnxruntime_outputs(onnx.load(tmp_path / "again.onnx"), x)
    np.testing.assert_array_equal(got, want)
    assert [p.name for p in tmp_path.iterdir()] == ["again.onnx"]  # no draft left behind


def test_constants_and_initializers_stand_in_one_place():
    nodes = [
        helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(np.float32([1, 2]))),
        helper.make_node("Constant", [], ["k"], value_ints=[1, 2]),
        helper.make_node("Constant", [], ["h"], value_float=0.5),
        helper.make_node("Mul", ["x", "w"], ["a"]),
        helper.make_node("Mul", ["a", "h"], ["b"]),
        helper.make_node("Reshape", ["b", "k"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])
    graph = jq.load(helper.make_model(helper.make_graph(nodes, "g", [x], [onnx.ValueInfoProto(name="y")])))
    assert [n.op_type for n in graph.nodes] == ["Mul", "Mul", "Reshape"]
    assert graph.params.keys() == {"w", "h"}
    assert graph.constants.keys() == {"k"}
    assert graph.params["h"].dtype == np.float32


def test_external_data_are_memory_mapped(tmp_path, rng):
    model = conv_model(rng)
    want = numpy_helper.to_array(model.graph.initializer[0])
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    graph = jq.load(tmp_path / "m.onnx")
    weight = graph.params["w"]
    while weight.base is not None and not isinstance(weight, np.memmap):
        weight = weight.base
    assert isinstance(weight, np.memmap)
    np.testing.assert_array_equal(graph.params["w"], want)


def test_external_data_above_two_gigabytes(tmp_path):
    """A sparse file stands for the 2.2 GB of weights: the map reads none of it but the slice asked for."""
    rows = 550_000
    node = helper.make_node("Gather", ["table", "i"], ["y"])
    table = TensorProto(
        name="table", data_type=TensorProto.FLOAT, dims=[rows, 1000], data_location=TensorProto.EXTERNAL
    )
    table.external_data.add(key="location", value="table.bin")
    index = helper.make_tensor_value_info("i", TensorProto.INT64, [1])
    graph = helper.make_graph(
        [node], "g", [index], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], [table]
    )
    (tmp_path / "m.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    with (tmp_path / "table.bin").open("wb") as file:
        file.truncate(rows * 4000)
    loaded = jq.load(tmp_path / "m.onnx")
    assert loaded.params["table"].nbytes > 1 << 31
    assert loaded.values["y"].shape == (1, 1000)
    with pytest.raises(jq.ModelError, match=r"2\.2 GB of weights do not fit"):
        jq.to_model(loaded)


@pytest.mark.parametrize("dtype", [np.float32, np.int8, ml_dtypes.bfloat16, ml_dtypes.int4])
def test_large_models_are_written_with_external_data(tmp_path, rng, monkeypatch, dtype):
    """The limit is lowered, so that some kilobytes stand for the gigabytes."""
    monkeypatch.setattr("jq.graph.write._LARGEST_PROTO", 1000)
    graph = jq.load(conv_model(rng))
    weights = {"w": rng.standard_normal((64, 3, 5, 5)).astype(dtype), "more": rng.standard_normal(5000).astype(dtype)}
    jq.save(graph.replace(params=weights), tmp_path / "large.onnx")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["large.onnx", "large.onnx.data"]
    again = jq.load(tmp_path / "large.onnx")
    for name, array in weights.items():
        assert again.params[name].dtype == array.dtype
        np.testing.assert_array_equal(again.params[name], array)
    assert (tmp_path / "large.onnx").stat().st_size < 1000 or dtype == ml_dtypes.int4


def test_shapes_are_inferred_with_symbols_kept():
    graph = jq.load(jq.zoo.path("fashion_resnet"))
    first = graph.nodes[0].outputs[0]
    assert graph.values[first].shape[0] == "N"
    assert all(isinstance(d, int) for d in graph.values[first].shape[1:])
    assert graph.values["logits"].dtype == np.float32


def test_nodes_in_any_order_are_sorted():
    nodes = [helper.make_node("Relu", ["a"], ["y"], name="second"), helper.make_node("Neg", ["x"], ["a"], name="first")]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])
    graph = jq.load(helper.make_model(helper.make_graph(nodes, "g", [x], [onnx.ValueInfoProto(name="y")])))
    assert [n.name for n in graph.nodes] == ["first", "second"]


def test_branches_with_equal_names_keep_their_own_constants():
    def branch(value: float) -> onnx.GraphProto:
        nodes = [
            helper.make_node("Constant", [], ["c"], value_floats=[value, value]),
            helper.make_node("Add", ["x", "c"], ["out"]),
        ]
        return helper.make_graph(nodes, "branch", [], [helper.make_tensor_value_info("out", TensorProto.FLOAT, [2])])

    node = helper.make_node("If", ["cond"], ["y"], then_branch=branch(1.0), else_branch=branch(2.0), name="choice")
    inputs = [
        helper.make_tensor_value_info("cond", TensorProto.BOOL, []),
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [2]),
    ]
    model = helper.make_model(
        helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])]),
        opset_imports=[helper.make_opsetid("", 21)],
        ir_version=10,
    )
    graph = jq.load(model)
    assert len(graph.params) == 2
    for cond in (True, False):
        feeds = {"cond": np.array(cond), "x": np.zeros(2, np.float32)}
        want = onnxruntime_outputs(model, feeds)[0]
        np.testing.assert_array_equal(jq.trace(graph)(graph.params, feeds)["y"], want)
        np.testing.assert_array_equal(onnxruntime_outputs(jq.to_model(graph), feeds)[0], want)


def test_local_functions_are_inlined():
    body = [helper.make_node("Mul", ["a", "a"], ["b"]), helper.make_node("Add", ["b", "a"], ["c"])]
    function = helper.make_function("acme", "SquarePlus", ["a"], ["c"], body, [helper.make_opsetid("", 21)])
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [3]) for n in "xy")
    big = numpy_helper.from_array(np.arange(3000, dtype=np.float32), "big")
    nodes = [
        helper.make_node("SquarePlus", ["x"], ["z"], domain="acme"),
        helper.make_node("Gather", ["big", "i"], ["g"]),
        helper.make_node("Add", ["z", "g"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "g", [x], [y], [big, numpy_helper.from_array(np.array([7, 8, 9]), "i")])
    model = helper.make_model(
        graph,
        functions=[function],
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("acme", 1)],
        ir_version=10,
    )
    loaded = jq.load(model)
    assert all(not n.domain for n in loaded.nodes)
    value = np.float32([1, 2, 3])
    np.testing.assert_array_equal(jq.trace(loaded)(loaded.params, {"x": value})["y"], value**2 + value + [7, 8, 9])


def test_graph_is_a_static_argument_of_jit():
    import jax

    graph = jq.load(jq.zoo.path("fashion_resnet"))
    run = jax.jit(lambda graph, x: jq.trace(graph)(graph.params, {"input": x})["logits"], static_argnums=0)
    assert run(graph, np.zeros((1, 1, 28, 28), np.float32)).shape == (1, 10)


def test_import_costs_little_more_than_jax():
    """The median of interleaved runs; typer, rich and onnxruntime must not be imported by `import jq`."""
    import subprocess
    import sys

    code = "import sys, jq; print([m for m in ('typer', 'rich', 'onnxruntime', 'onnx.reference') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "[]"
    )


def test_a_reduction_to_a_long_vector_is_no_shape_to_onnx():
    """Its inference took 9 GB for two thousand million rows; a length that it does not know costs nothing."""
    nodes = [
        helper.make_node("ReduceMax", ["x", "a"], ["m"], keepdims=0),
        helper.make_node("Unsqueeze", ["m", "a"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(k, TensorProto.FLOAT, s) for k, s in (("x", [1 << 24, 3]), ("y", None))]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [numpy_helper.from_array(np.array([1]), "a")])
    values = jq.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)).values
    assert [len(values[k].shape) for k in "xmy"] == [2, 1, 2]
    assert values["x"].shape == (1 << 24, 3) and not isinstance(values["m"].shape[0], int)
