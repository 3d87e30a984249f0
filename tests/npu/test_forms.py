"""`jq.npu.rewrites.FORMS` against what the chip computes, in numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from jq.graph import Graph
from jq.graph.read import load
from jq.graph.write import to_model
from jq.npu.rewrites import FORMS, STRUCTURE
from jq.readings.tracing import trace
from tests.conftest import onnxruntime_outputs
from tests.passes.models import build, node, normal, ops


def formed(
    name: str, model: onnx.ModelProto, formula: Callable[[np.ndarray], np.ndarray], *, rtol: float = 1e-6
) -> Graph:
    """The rewritten graph, after its first output was compared with a formula of its input."""
    graph = load(model)
    result = FORMS[name](graph)
    assert FORMS[name](graph, lambda _: False) is graph
    assert [v.name for v in result.outputs] == [v.name for v in graph.outputs]
    shape = [d if isinstance(d, int) else 3 for d in graph.inputs[0].shape]
    x = 2 * np.random.default_rng(1).standard_normal(shape).astype(graph.inputs[0].dtype)
    exported = to_model(result)
    onnx.checker.check_model(exported, full_check=True)
    want = formula(x.astype(np.float64))
    np.testing.assert_allclose(onnxruntime_outputs(exported, {"x": x})[0], want, rtol=rtol, atol=rtol)
    np.testing.assert_allclose(
        trace(result)(result.params, {"x": x})[graph.outputs[0].name], want, rtol=1e-5, atol=1e-6
    )
    return result


def scales(graph: Graph) -> dict[str, float]:
    return {k: a.item() for k, a in graph.params.items() if k.endswith("_Scale")}


def pooled(kernel: Sequence[int]) -> Callable[[np.ndarray], np.ndarray]:
    windows = np.lib.stride_tricks.sliding_window_view
    return lambda x: windows(x, tuple(kernel), axis=(2, 3)).mean((-2, -1))


def hard_sigmoid(x: np.ndarray) -> np.ndarray:
    return np.clip(x / 6 + 0.5, 0, 1)


def test_order() -> None:
    assert list(FORMS) == [
        "leaky_relu_alpha",
        "sigmoid_to_hard_sigmoid",
        "hard_sigmoid_factor",
        "average_pool_factor",
        "rectangular_pool_factor",
        "reduce_mean_factor",
    ]


@pytest.mark.parametrize("name", list(FORMS))
def test_nothing_to_do(name: str) -> None:
    graph = load(build([node("Relu", ["x"], ["y"])]))
    assert FORMS[name](graph) is graph
    op_types = ("LeakyRelu", "Sigmoid", "HardSigmoid", "AveragePool", "GlobalAveragePool", "ReduceMean")
    attrs = {"alpha": 1 / 6, "axes": (2, 3), "kernel_shape": (3, 3)}
    graph = graph.replace(
        nodes=tuple(graph.nodes[0].replace(op_type=t, domain="theirs", attrs=attrs) for t in op_types)
    )
    assert FORMS[name](graph) is graph


class TestLeakyRelu:
    @pytest.mark.parametrize(("alpha", "steps"), [(0.1, 26), (0.01, 3), (0.2, 51), (0.001, 0), (-0.3, -77), (1.7, 435)])
    def test_alpha(self, alpha: float, steps: int) -> None:
        model = build([node("LeakyRelu", ["x"], ["y"], alpha=alpha, name="l")])
        graph = formed("leaky_relu_alpha", model, lambda x: np.where(x < 0, x * steps / 256, x))
        assert graph.nodes[0].attrs == {"alpha": steps / 256}
        assert graph.nodes[0].name == "l"
        assert FORMS["leaky_relu_alpha"](graph) is graph

    def test_default(self) -> None:
        model = build([node("LeakyRelu", ["x"], ["y"])])
        formed("leaky_relu_alpha", model, lambda x: np.where(x < 0, x * 3 / 256, x))

    @pytest.mark.parametrize("alpha", [0.25, np.nan, np.inf])
    def test_alpha_in_256ths_or_not_finite_is_left(self, alpha: float) -> None:
        graph = load(build([node("LeakyRelu", ["x"], ["y"], alpha=alpha)]))
        assert FORMS["leaky_relu_alpha"](graph) is graph


class TestSigmoid:
    @pytest.mark.parametrize("opset", [7, 13, 21, 22])
    def test_hard(self, opset: int) -> None:
        model = build([node("Sigmoid", ["x"], ["y"], name="s")], opset=opset)
        graph = formed("sigmoid_to_hard_sigmoid", model, hard_sigmoid)
        assert ops(graph) == ["HardSigmoid"]
        assert graph.nodes[0].name == "s"
        assert FORMS["sigmoid_to_hard_sigmoid"](graph) is graph

    @pytest.mark.parametrize("attrs", [{"alpha": 1 / 6}, {"alpha": 0.1666667, "beta": 0.5}, {"alpha": 0.1667}])
    @pytest.mark.parametrize("opset", [7, 21])
    def test_factor(self, attrs: Mapping[str, float], opset: int) -> None:
        model = build([node("HardSigmoid", ["x"], ["y"], name="h", **attrs)], opset=opset)
        graph = formed("hard_sigmoid_factor", model, lambda x: hard_sigmoid(x) * 16386 / 16384)
        assert ops(graph) == ["HardSigmoid", "Mul"]
        assert scales(graph) == {"y_Scale": 1.0001220703125}
        assert [(n.name, n.inputs, n.outputs) for n in graph.nodes] == [
            ("h", ("x",), ("y_Mul",)),
            ("y_Mul", ("y_Mul", "y_Scale"), ("y",)),
        ]

    @pytest.mark.parametrize("attrs", [{}, {"alpha": 0.2}, {"alpha": 1 / 6, "beta": 0.4}, {"beta": 0.5}])
    def test_other_slopes_are_left(self, attrs: Mapping[str, float]) -> None:
        graph = load(build([node("HardSigmoid", ["x"], ["y"], **attrs)]))
        assert FORMS["hard_sigmoid_factor"](graph) is graph

    def test_broadcast_of_early_opsets(self) -> None:
        graph = load(build([node("HardSigmoid", ["x"], ["y"], alpha=1 / 6)], opset=6))
        result = FORMS["hard_sigmoid_factor"](graph)
        assert result.nodes[1].attrs == {"broadcast": 1}
        x = normal(2, 4, 5, 6)
        found = trace(result)(result.params, {"x": x})["y"]
        np.testing.assert_allclose(found, hard_sigmoid(x) * 16386 / 16384, rtol=1e-6)

    def test_swish(self) -> None:
        """All that touches it: the product of the gate stays between the HardSigmoid and the Mul by x."""
        graph = STRUCTURE["hard_swish_to_product"](load(build([node("HardSwish", ["x"], ["y"])])))
        result = FORMS["hard_sigmoid_factor"](graph)
        assert ops(result) == ["HardSigmoid", "Mul", "Mul"]
        gate = "_inlfunc_HardSwish_HS_X"
        assert result.nodes[2].inputs == ("x", gate)
        assert result.nodes[1].outputs == (gate,)


class TestPools:
    @pytest.mark.parametrize(
        ("kernel", "factor"),
        [((3, 3), 63 / 64), ((5, 5), 250 / 256), ((2, 2), 1.0), ((4, 4), 1.0), ((7, 7), 1029 / 1024)],
    )
    @pytest.mark.parametrize("opset", [7, 11, 19, 22])
    def test_square(self, kernel: tuple[int, int], factor: float, opset: int) -> None:
        model = build([node("AveragePool", ["x"], ["y"], kernel_shape=kernel)], x=(2, 3, 8, 9), opset=opset)
        graph = formed("average_pool_factor", model, lambda x: pooled(kernel)(x) * factor)
        assert ops(graph) == ["AveragePool", "Mul"]
        assert scales(graph) == {"y_Scale": factor}
        assert FORMS["rectangular_pool_factor"](load(model)).nodes[0].op_type == "AveragePool"

    def test_rectangle(self) -> None:
        model = build([node("AveragePool", ["x"], ["y"], kernel_shape=(2, 3))])
        formed("rectangular_pool_factor", model, lambda x: pooled((2, 3))(x) * 85 * 6 / 512)
        graph = load(model)
        assert FORMS["average_pool_factor"](graph) is graph

    @pytest.mark.parametrize(("side", "factor"), [(14, 4116 / 4096), (7, 1029 / 1024), (1, 1.0), (256, 1.0)])
    def test_global(self, side: int, factor: float) -> None:
        nodes = [node("Relu", ["x"], ["r"]), node("GlobalAveragePool", ["r"], ["y"])]
        model = build(nodes, x=("N", 2, side, side))
        formed("average_pool_factor", model, lambda x: np.maximum(x, 0).mean((2, 3), keepdims=True) * factor)
        graph = load(model)
        assert FORMS["rectangular_pool_factor"](graph) is graph

    def test_global_rectangle(self) -> None:
        model = build([node("GlobalAveragePool", ["x"], ["y"])], x=("N", 2, 2, 3))
        formed("rectangular_pool_factor", model, lambda x: x.mean((2, 3), keepdims=True) * 85 * 6 / 512)

    @pytest.mark.parametrize("shape", [(2, 3, "H", "W"), (2, 3, 5), (2, 3, 5, 5, 5), (2, 3, None, 5)])
    def test_others_are_left(self, shape: tuple[int | str | None, ...]) -> None:
        graph = load(build([node("GlobalAveragePool", ["x"], ["y"])], x=shape))
        assert all(FORMS[f](graph) is graph for f in ("average_pool_factor", "rectangular_pool_factor"))

    def test_other_ranks_are_left(self) -> None:
        graph = load(build([node("AveragePool", ["x"], ["y"], kernel_shape=[3])], x=(2, 3, 7)))
        assert all(FORMS[f](graph) is graph for f in ("average_pool_factor", "rectangular_pool_factor"))

    def test_half_precision(self) -> None:
        model = build([node("AveragePool", ["x"], ["y"], kernel_shape=[3, 3])], dtype=TensorProto.FLOAT16)
        graph = FORMS["average_pool_factor"](load(model))
        assert graph.params["y_Scale"].dtype == np.float16
        onnx.checker.check_model(to_model(graph), full_check=True)

    def test_taken_names(self) -> None:
        nodes = [
            node("Add", ["x", "y_Scale"], ["y_Mul"], name="y_Mul"),
            node("AveragePool", ["y_Mul"], ["y"], kernel_shape=[3, 3]),
        ]
        model = build(nodes, {"y_Scale": np.float32(1)}, outputs=("y", "y_Mul"))
        graph = formed("average_pool_factor", model, lambda x: pooled((3, 3))(x + 1) * 63 / 64)
        assert ops(graph) == ["Add", "AveragePool", "Mul"]

    def test_readers_and_outputs_keep_the_name(self) -> None:
        nodes = [node("AveragePool", ["x"], ["p"], kernel_shape=[3, 3]), node("Relu", ["p"], ["y"])]
        graph = FORMS["average_pool_factor"](load(build(nodes, outputs=("y", "p"))))
        assert ops(graph) == ["AveragePool", "Mul", "Relu"]
        assert graph.nodes[2].inputs == ("p",)

    def test_some_are_excluded(self) -> None:
        nodes = [node("AveragePool", [s], [t], kernel_shape=[2, 2], name=t) for s, t in (("x", "p"), ("p", "y"))]
        graph = FORMS["average_pool_factor"](load(build(nodes)), lambda n: n.name != "p")
        assert ops(graph) == ["AveragePool", "AveragePool", "Mul"]


class TestReduceMean:
    @pytest.mark.parametrize("opset", [11, 18])
    @pytest.mark.parametrize("keepdims", [0, 1])
    @pytest.mark.parametrize(("axes", "factor"), [([2, 3], 1029 / 1024), ([-1], 511 / 512), ([1], 255 / 256)])
    def test_factor(self, opset: int, keepdims: int, axes: list[int], factor: float) -> None:
        attrs = {"keepdims": keepdims}
        shape = ("N", 3, 7, 7)
        if opset < 18:
            model = build([node("ReduceMean", ["x"], ["y"], axes=axes, **attrs)], x=shape, opset=opset)
        else:
            model = build([node("ReduceMean", ["x", "a"], ["y"], **attrs)], {"a": np.array(axes)}, x=shape, opset=opset)
        graph = formed("reduce_mean_factor", model, lambda x: x.mean(tuple(axes), keepdims=bool(keepdims)) * factor)
        assert ops(graph) == ["ReduceMean", "Mul"]

    def test_others_are_left(self) -> None:
        for model in (
            build([node("ReduceMean", ["x"], ["y"])]),
            build([node("ReduceMean", ["x"], ["y"], axes=[0, 1])], x=("N", 4, 5, 6)),
            build([node("ReduceMean", ["x", "a"], ["y"])], {"a": np.array([], np.int64)}, opset=18),
        ):
            graph = load(model)
            assert FORMS["reduce_mean_factor"](graph) is graph


def test_all_of_them() -> None:
    nodes = [
        node("LeakyRelu", ["x"], ["l"], alpha=0.1),
        node("AveragePool", ["l"], ["p"], kernel_shape=[3, 3]),
        node("Sigmoid", ["p"], ["s"]),
        node("AveragePool", ["s"], ["q"], kernel_shape=[2, 3]),
        node("ReduceMean", ["q"], ["y"], axes=[1]),
    ]
    graph = load(build(nodes, x=(1, 3, 8, 8)))
    for form in FORMS.values():
        graph = form(graph)
    assert ops(graph) == [
        "LeakyRelu",
        "AveragePool",
        "Mul",
        "HardSigmoid",
        "Mul",
        "AveragePool",
        "Mul",
        "ReduceMean",
        "Mul",
    ]
    assert all(form(graph) is graph for form in FORMS.values())  # a second application
    x = normal(1, 3, 8, 8)
    leaky = np.where(x < 0, x * 26 / 256, x)
    gate = hard_sigmoid(pooled((3, 3))(leaky) * 63 / 64) * 16386 / 16384
    want = (pooled((2, 3))(gate) * 85 * 6 / 512).mean(1, keepdims=True) * 255 / 256
    np.testing.assert_allclose(onnxruntime_outputs(to_model(graph), {"x": x})[0], want, rtol=1e-6)
