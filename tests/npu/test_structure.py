"""`jq.npu.rewrites.STRUCTURE`: what the graph computes stays what onnxruntime says of the original."""

from __future__ import annotations

import jax
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from jq.graph import Graph
from jq.graph.read import load
from jq.graph.write import to_model
from jq.npu.rewrites import STRUCTURE
from jq.readings.tracing import trace
from tests.conftest import onnxruntime_outputs
from tests.passes.models import batchnorm, build, node, normal, ops, statistics


def rewritten(name: str, model: onnx.ModelProto, *, rtol: float = 0.0) -> Graph:
    """The rewritten graph, after its outputs were compared with the original's: exported, and traced."""
    graph, rewrite = load(model), STRUCTURE[name]
    result = rewrite(graph)
    shape = [d if isinstance(d, int) else 3 for d in graph.inputs[0].shape]
    feeds = {"x": np.random.default_rng(1).standard_normal(shape).astype(graph.inputs[0].dtype)}
    exported = to_model(result)
    onnx.checker.check_model(exported, full_check=True)
    expected = onnxruntime_outputs(to_model(graph), feeds)
    for want, have in zip(expected, onnxruntime_outputs(exported, feeds), strict=True):
        assert want.dtype == have.dtype
        np.testing.assert_allclose(have, want, rtol=rtol, atol=rtol)
    traced = trace(result)(result.params, feeds)
    for value, want in zip(graph.outputs, expected, strict=True):
        np.testing.assert_allclose(traced[value.name], want, rtol=1e-5, atol=1e-5)
    assert [v.name for v in result.outputs] == [v.name for v in graph.outputs]
    assert rewrite(result) is result  # nothing is left to do
    assert rewrite(graph, lambda _: False) is graph
    return result


def untouched(name: str, model: onnx.ModelProto) -> None:
    graph = load(model)
    assert STRUCTURE[name](graph) is graph


def test_order() -> None:
    assert list(STRUCTURE) == [
        "reduce_mean_to_pool",
        "reduce_mean_to_flat_pool",
        "split_large_pool",
        "split_to_slice",
        "batchnorm_to_conv",
        "depthwise_to_dense",
        "shuffle_to_weights",
        "shuffle_to_conv",
        "transpose_in_four",
        "gather_to_slice",
        "clip_to_relu",
        "hard_sigmoid_to_clip",
        "resize_to_matmul",
        "resize_to_depth_to_space",
        "pad_to_pool",
        "pad_by_ones",
        "flat_concat",
        "hard_swish_to_product",
        "matmul_to_gemm",
        "dynamic_matmul_to_gemm",
    ]


@pytest.mark.parametrize("name", list(STRUCTURE))
def test_nothing_to_do(name: str) -> None:
    untouched(name, build([node("Relu", ["x"], ["y"])]))


@pytest.mark.parametrize("name", list(STRUCTURE))
def test_other_domains(name: str) -> None:
    graph = load(build([node("Relu", ["x"], ["y"])]))
    op_types = ("ReduceMean", "GlobalAveragePool", "Split", "BatchNormalization", "HardSwish")
    graph = graph.replace(nodes=tuple(graph.nodes[0].replace(op_type=t, domain="theirs") for t in op_types))
    assert STRUCTURE[name](graph) is graph


class TestReduceMean:
    @pytest.mark.parametrize("axes", [[2, 3], [-2, -1], [3, 2], [2, -1]])
    @pytest.mark.parametrize("keepdims", [None, 1])
    @pytest.mark.parametrize("opset", [11, 13, 18, 21])
    def test_over_an_image(self, axes: list[int], keepdims: int | None, opset: int) -> None:
        attrs = {} if keepdims is None else {"keepdims": keepdims}
        if opset < 18:
            model = build([node("ReduceMean", ["x"], ["y"], name="m", axes=axes, **attrs)], opset=opset)
        else:
            model = build(
                [node("ReduceMean", ["x", "a"], ["y"], name="m", **attrs)], {"a": np.array(axes)}, opset=opset
            )
        graph = rewritten("reduce_mean_to_pool", model, rtol=1e-6)
        assert ops(graph) == ["GlobalAveragePool"]
        assert (graph.nodes[0].name, graph.nodes[0].inputs, graph.nodes[0].attrs) == ("m", ("x",), {})

    def test_symbolic_dims(self) -> None:
        model = build([node("ReduceMean", ["x"], ["y"], axes=[2, 3])], x=("N", 4, None, "W"))
        assert ops(rewritten("reduce_mean_to_pool", model, rtol=1e-6)) == ["GlobalAveragePool"]

    def test_others_are_left(self) -> None:
        for axes in ([1, 2], [2], [1, 2, 3], [2, 2]):
            model = build([node("Relu", ["x"], ["y"])])
            graph = load(model)
            mean = graph.nodes[0].replace(op_type="ReduceMean", attrs={"axes": tuple(axes)})
            graph = graph.replace(nodes=(mean,))
            assert STRUCTURE["reduce_mean_to_pool"](graph) is graph
        untouched("reduce_mean_to_pool", build([node("ReduceMean", ["x"], ["y"])]))
        untouched("reduce_mean_to_pool", build([node("ReduceMean", ["x"], ["y"], axes=[2, 3], keepdims=0)]))
        untouched("reduce_mean_to_pool", build([node("ReduceMean", ["x"], ["y"], axes=[2, 3])], x=(2, 3, 4, 5, 6)))
        untouched("reduce_mean_to_pool", build([node("ReduceMean", ["x"], ["y"], axes=[-2, -1])], x=(3, 4, 5)))
        integers = build([node("ReduceMean", ["x"], ["y"], axes=[2, 3])], dtype=TensorProto.INT32)
        untouched("reduce_mean_to_pool", integers)


class TestLargePool:
    @pytest.mark.parametrize(
        ("height", "width", "first"), [(32, 32, (4, 4)), (56, 56, (7, 7)), (24, 40, (4, 5)), (1, 600, (1, 24))]
    )
    def test_two_steps(self, height: int, width: int, first: tuple[int, int]) -> None:
        nodes = [node("Relu", ["x"], ["r"]), node("GlobalAveragePool", ["r"], ["y"], name="pool")]
        graph = rewritten("split_large_pool", build(nodes, x=(1, 3, height, width)), rtol=1e-6)
        assert ops(graph) == ["Relu", "AveragePool", "GlobalAveragePool"]
        assert graph.nodes[1].attrs == {"kernel_shape": first, "strides": first}
        assert graph.nodes[1].outputs == ("r_Split",)
        assert graph.nodes[2].name == "pool"

    def test_two_pools_of_one_tensor(self) -> None:
        nodes = [node("GlobalAveragePool", ["x"], [o]) for o in ("y", "z")]
        graph = rewritten("split_large_pool", build(nodes, x=(1, 3, 32, 32), outputs=("y", "z")), rtol=1e-6)
        assert len(graph.tensors) == 5

    @pytest.mark.parametrize("shape", [(16, 32), (37, 37), (1, 1024 * 1024), (64, "W"), (None, 64)])
    def test_others_are_left(self, shape: tuple[int | str | None, ...]) -> None:
        untouched("split_large_pool", build([node("GlobalAveragePool", ["x"], ["y"])], x=(1, 3, *shape)))

    def test_volumes_are_left(self) -> None:
        untouched("split_large_pool", build([node("GlobalAveragePool", ["x"], ["y"])], x=(1, 3, 16, 16, 16)))


class TestSplit:
    @pytest.mark.parametrize("axis", [1, -3, 0, None])
    @pytest.mark.parametrize("opset", [8, 9, 11, 12, 13, 17, 18, 21])
    @pytest.mark.parametrize("equal", [True, False])
    def test_opsets(self, axis: int | None, opset: int, equal: bool) -> None:
        attrs = {} if axis is None else {"axis": axis}
        arrays = {}
        inputs = ["x"]
        if equal:
            attrs |= {"num_outputs": 2} if opset >= 18 else {}
        elif opset < 13:
            attrs |= {"split": [1, 5]}
        else:
            inputs, arrays = ["x", "s"], {"s": np.array([1, 5])}
        if axis is not None and axis < 0 and opset < 11:
            pytest.skip("the axis is not negative there")
        model = build([node("Split", inputs, ["y", "z"], **attrs)], arrays, x=(6, 6, 5, 4), outputs="yz", opset=opset)
        graph = rewritten("split_to_slice", model)
        assert ops(graph) == ["Slice", "Slice"]
        assert [n.outputs for n in graph.nodes] == [("y",), ("z",)]

    def test_uneven_last(self) -> None:
        split = node("Split", ["x"], ["a", "b", "c"], axis=1, num_outputs=3)
        graph = rewritten("split_to_slice", build([split], x=(2, 8, 3, 3), outputs="abc", opset=18))
        assert [graph.values[n.outputs[0]].shape[1] for n in graph.nodes] == [3, 3, 2]

    def test_symbolic_dims(self) -> None:
        split = node("Split", ["x"], ["y", "z"], axis=1, split=[2, 1])
        assert ops(rewritten("split_to_slice", build([split], x=("N", "C"), outputs="yz", opset=11))) == ["Slice"] * 2
        untouched("split_to_slice", build([node("Split", ["x"], ["y", "z"])], x=("N", 4), outputs="yz", opset=11))

    def test_taken_names(self) -> None:
        nodes = [node("Split", ["x"], ["y", "y_starts_0"], axis=1), node("Relu", ["y"], ["y_axes_0"])]
        outputs = ("y", "y_starts_0", "y_axes_0")
        assert ops(rewritten("split_to_slice", build(nodes, outputs=outputs))) == ["Slice", "Slice", "Relu"]

    def test_taken_node_names(self) -> None:
        nodes = [node("Split", ["x"], ["y", "z"], axis=1, name="y"), node("Relu", ["y"], ["r"], name="y_0")]
        graph = rewritten("split_to_slice", build(nodes, outputs="rz"))
        assert len({n.name for n in graph.nodes}) == 3

    def test_sizes_that_only_the_data_tell(self) -> None:
        sizes = helper.make_tensor_value_info("s", TensorProto.INT64, (2,))
        split = node("Split", ["x", "s"], ["y", "z"], axis=1)
        untouched("split_to_slice", build([split], outputs="yz", extra_inputs=[sizes]))

    def test_broken(self) -> None:
        graph = load(build([node("Split", ["x"], ["y", "z"], axis=1)], outputs="yz"))
        for attrs in ({"axis": 7}, {"axis": 1, "split": (1, 1)}, {"axis": 1, "split": (4,)}, {"axis": 2}):
            broken = graph.replace(nodes=(graph.nodes[0].replace(attrs=attrs),))
            assert STRUCTURE["split_to_slice"](broken) is broken

    def test_some_are_excluded(self) -> None:
        nodes = [node("Split", ["x"], ["a", "b"], axis=1, name="p"), node("Split", ["a"], ["c", "d"], axis=1, name="q")]
        graph = load(build(nodes, outputs="bcd"))
        assert ops(STRUCTURE["split_to_slice"](graph, lambda n: n.name != "p")) == ["Split", "Slice", "Slice"]


class TestBatchNorm:
    @pytest.mark.parametrize("opset", [7, 9, 14, 15, 21])
    @pytest.mark.parametrize("epsilon", [None, 1e-3, 0.0])
    def test_depthwise(self, opset: int, epsilon: float | None) -> None:
        attrs = {} if epsilon is None else {"epsilon": epsilon}
        nodes = [node("Relu", ["x"], ["r"]), batchnorm("r", "y", "bn", **attrs)]
        # onnxruntime's own float32 formula is x * s + (b - m * s): the same, with other roundings
        graph = rewritten("batchnorm_to_conv", build(nodes, statistics("bn", 4), opset=opset), rtol=1e-4)
        assert ops(graph) == ["Relu", "Conv"]
        conv = graph.nodes[1]
        assert (conv.name, conv.inputs, conv.attrs["group"]) == ("bn", ("r", "yweights", "ybias"), 4)
        assert graph.params["yweights"].shape == (4, 1, 1, 1)

    def test_exact(self) -> None:
        arrays = {k: np.array([1.0, 2.0, 4.0, 8.0], np.float32) for k in ("bn.g", "bn.b", "bn.m")}
        arrays["bn.v"] = np.array([1.0, 4.0, 16.0, 0.25], np.float32)
        graph = rewritten("batchnorm_to_conv", build([batchnorm("x", "y", "bn", epsilon=0.0)], arrays), rtol=1e-6)
        np.testing.assert_array_equal(graph.params["yweights"].reshape(-1), [1, 1, 1, 16])
        np.testing.assert_array_equal(graph.params["ybias"], [0, 0, 0, -120])

    def test_types_of_the_statistics(self) -> None:
        arrays = {k: a.astype(np.float16) if k in ("bn.g", "bn.b") else a for k, a in statistics("bn", 4).items()}
        arrays["bn.v"] = np.ones(4, np.float32)
        graph = load(build([batchnorm("x", "y", "bn")], arrays, opset=15, dtype=TensorProto.FLOAT16))
        result = STRUCTURE["batchnorm_to_conv"](graph)
        assert {result.params[n].dtype for n in result.nodes[0].inputs[1:]} == {np.dtype(np.float16)}

    def test_taken_names(self) -> None:
        arrays = {**statistics("bn", 4), "yweights": normal(1)}
        nodes = [batchnorm("x", "b", "bn"), node("Add", ["b", "yweights"], ["ybias"]), node("Relu", ["ybias"], ["r"])]
        nodes.append(node("BatchNormalization", ["r", *(f"bn.{p}" for p in "gbmv")], ["y"]))
        assert ops(rewritten("batchnorm_to_conv", build(nodes, arrays), rtol=1e-3)) == ["Conv", "Add", "Relu", "Conv"]

    def test_others_are_left(self) -> None:
        arrays = statistics("bn", 4)
        untouched("batchnorm_to_conv", build([batchnorm("x", "y", "bn")], arrays, x=(2, 4, 5)))
        untouched("batchnorm_to_conv", build([batchnorm("x", "y", "bn")], arrays, x=(2, 4)))
        training = node("BatchNormalization", ["x", *(f"bn.{p}" for p in "gbmv")], ["y", "m", "v"], training_mode=1)
        untouched("batchnorm_to_conv", build([training], arrays))
        negative = {**arrays, "bn.v": np.full(4, -1.0, np.float32)}  # the root of it is no number
        untouched("batchnorm_to_conv", build([batchnorm("x", "y", "bn")], negative))


class TestHardSwish:
    @pytest.mark.parametrize("opset", [14, 17, 22])
    def test_named_as_by_onnxruntime(self, opset: int) -> None:
        nodes = [node("HardSwish", [s], [t], name=t) for s, t in (("x", "a"), ("a", "b"), ("b", "y"))]
        graph = rewritten("hard_swish_to_product", build(nodes, opset=opset), rtol=1e-6)
        assert ops(graph) == ["HardSigmoid", "Mul"] * 3
        gates = ["_inlfunc_HardSwish_HS_X", "_inlfunc_HardSwish_token_0_HS_X", "_inlfunc_HardSwish_token_1_HS_X"]
        assert [n.outputs[0] for n in graph.nodes] == [gates[0], "a", gates[1], "b", gates[2], "y"]
        assert graph.nodes[1].inputs == ("x", gates[0])
        assert graph.nodes[1].name == "a"

    def test_excluded_one_has_its_number(self) -> None:
        nodes = [node("HardSwish", ["x"], ["a"], name="p"), node("HardSwish", ["a"], ["y"], name="q")]
        graph = STRUCTURE["hard_swish_to_product"](load(build(nodes)), lambda n: n.name != "p")
        assert ops(graph) == ["HardSwish", "HardSigmoid", "Mul"]
        assert graph.nodes[1].outputs == ("_inlfunc_HardSwish_token_0_HS_X",)


def test_differentiable() -> None:
    """Weights that a rewrite makes are params: they train."""
    graph = STRUCTURE["batchnorm_to_conv"](load(build([batchnorm("x", "y", "bn")], statistics("bn", 4))))
    x = normal(2, 4, 5, 6)
    gradient = jax.grad(lambda p: trace(graph)({**graph.params, **p}, {"x": x})["y"].sum())({"ybias": np.zeros(4)})
    np.testing.assert_allclose(gradient["ybias"], 60.0)
