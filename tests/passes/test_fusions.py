"""Pads, slices and matrix products that become part of another operator: the same function, fewer nodes."""

from __future__ import annotations

import numpy as np
import pytest

import jq
from jq.npu.rewrites import STRUCTURE
from jq.passes.pads import fuse_pads
from jq.passes.slices import merge_slices
from tests.conftest import onnxruntime_outputs
from tests.passes.models import build, node, normal, ops

PADS = {"p": np.array([0, 0, 1, 2, 0, 0, 0, 1])}
KERNEL = {"w": normal(4, 3, 3, 3)}


def same(before, after, shape):
    feed = {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
    want = onnxruntime_outputs(jq.to_model(before), feed)[0]
    np.testing.assert_allclose(
        onnxruntime_outputs(jq.to_model(after), feed)[0], want, rtol=1e-5, atol=1e-5, strict=True
    )


class TestPads:
    @pytest.mark.parametrize("attrs", [{}, {"pads": [1, 0, 2, 1]}, {"strides": [2, 2]}], ids=str)
    def test_a_conv_takes_them(self, attrs):
        nodes = [node("Pad", ["x", "p"], ["q"]), node("Conv", ["q", "w"], ["y"], **attrs)]
        before = jq.load(build(nodes, {**PADS, **KERNEL}, x=(1, 3, 8, 8)))
        after = jq.prepare(before)
        assert ops(after) == ["Conv"]
        same(before, after, (1, 3, 8, 8))

    @pytest.mark.parametrize("attrs", [{}, {"pads": [1, 0, 1, 1], "count_include_pad": 1}], ids=str)
    def test_an_average_pool_counts_them(self, attrs):
        nodes = [node("Pad", ["x", "p"], ["q"]), node("AveragePool", ["q"], ["y"], kernel_shape=[3, 3], **attrs)]
        before = jq.load(build(nodes, PADS, x=(1, 3, 8, 8)))
        after = jq.prepare(before)
        assert ops(after) == ["AveragePool"] and after.nodes[0].attrs["count_include_pad"] == 1
        same(before, after, (1, 3, 8, 8))

    def test_a_pool_without_its_kernel_is_left_to_whoever_evaluates_it(self):
        nodes = [node("Pad", ["x", "p"], ["q"]), node("AveragePool", ["q"], ["y"])]
        graph = jq.load(build(nodes, PADS, x=(1, 3, 8, 8)))
        assert fuse_pads(graph) is graph

    def test_axes_that_a_pad_names_stay(self):
        pad = node("Pad", ["x", "p", "", "axes"], ["q"])
        arrays = {"p": np.array([1, 2, 0, 1]), "axes": np.array([2, 3]), **KERNEL}
        graph = jq.load(build([pad, node("Conv", ["q", "w"], ["y"])], arrays, x=(1, 3, 8, 8), opset=18))
        assert fuse_pads(graph) is graph

    def test_every_conv_takes_them_and_others_keep_the_pad(self):
        nodes = [
            node("Pad", ["x", "p"], ["q"]),
            node("Conv", ["q", "w"], ["a"]),
            node("Relu", ["q"], ["b"]),
            node("ReduceSum", ["a"], ["c"], keepdims=0),
            node("Add", ["b", "c"], ["y"]),
        ]
        before = jq.load(build(nodes, {**PADS, **KERNEL}, x=(1, 3, 8, 8)))
        after = jq.prepare(before)
        assert sorted(ops(after)) == ["Add", "Conv", "Pad", "ReduceSum", "Relu"]
        assert after.producer["a"].inputs[0] == "x"
        same(before, after, (1, 3, 8, 8))

    @pytest.mark.parametrize(
        ("pad", "arrays", "reader"),
        [
            (node("Pad", ["x", "p"], ["q"], mode="reflect"), PADS, node("Conv", ["q", "w"], ["y"])),
            (node("Pad", ["x", "p", "v"], ["q"]), PADS | {"v": np.float32(1)}, node("Conv", ["q", "w"], ["y"])),
            (node("Pad", ["x", "p"], ["q"]), {"p": np.array([0, 0, -1, 0, 0, 0, 0, 0])}, node("Conv", ["q", "w"], ["y"])),
            (node("Pad", ["x", "p"], ["q"]), {"p": np.array([1, 0, 0, 0, 0, 0, 0, 0])}, node("Conv", ["q", "w"], ["y"])),
            (node("Pad", ["x", "p"], ["q"]), PADS, node("Conv", ["q", "w"], ["y"], auto_pad="SAME_UPPER")),
            (node("Pad", ["x", "p"], ["q"]), PADS, node("MaxPool", ["q"], ["y"], kernel_shape=[3, 3])),
            (
                node("Pad", ["x", "p"], ["q"]), PADS,
                node("AveragePool", ["q"], ["y"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
            ),
            (
                node("Pad", ["x", "p"], ["q"]), PADS,
                node("AveragePool", ["q"], ["y"], kernel_shape=[3, 3], pads=[0, 1, 0, 0], count_include_pad=1),
            ),
            (
                node("Pad", ["x", "p"], ["q"]), PADS,
                node("AveragePool", ["q"], ["y"], kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1),
            ),
        ],
    )  # fmt: skip
    def test_what_is_another_function_stays(self, pad, arrays, reader):
        graph = jq.load(build([pad, reader], {**arrays, **KERNEL}, x=(1, 3, 8, 8)))
        assert fuse_pads(graph) is graph


class TestSlices:
    def arrays(self, second_axis):
        return {"a": np.array([1]), "b": np.array([6]), "two": np.array([2]), "other": np.array([second_axis])}

    def test_along_other_axes_are_one(self):
        nodes = [node("Slice", ["x", "a", "b", "two"], ["s"]), node("Slice", ["s", "a", "b", "other", "two"], ["y"])]
        before = jq.load(build(nodes, self.arrays(3), x=(1, 3, 8, 8)))
        after = merge_slices(before)
        assert ops(after) == ["Slice"]
        same(before, after, (1, 3, 8, 8))

    def test_numbers_that_are_no_vectors_stay(self):
        numbers = {"a": np.array(1), "b": np.array(6), "two": np.array(2), "three": np.array(3)}
        nodes = [node("Slice", ["x", "a", "b", "two"], ["s"]), node("Slice", ["s", "a", "b", "three"], ["y"])]
        graph = jq.load(build(nodes, numbers, x=(1, 3, 8, 8)))
        assert merge_slices(graph) is graph

    def test_along_the_same_axis_stay(self):
        nodes = [node("Slice", ["x", "a", "b", "two"], ["s"]), node("Slice", ["s", "a", "b", "other"], ["y"])]
        graph = jq.load(build(nodes, self.arrays(2), x=(1, 3, 8, 8)))
        assert merge_slices(graph) is graph


class TestProducts:
    ARRAYS = {"w": normal(8, 5), "b": normal(5)}  # noqa: RUF012  never written

    def rewritten(self, name, shape, order=("m", "b"), bias=None):
        nodes = [node("MatMul", ["x", "w"], ["m"]), node("Add", order, ["a"]), node("Relu", ["a"], ["y"])]
        arrays = self.ARRAYS if bias is None else {**self.ARRAYS, "b": bias}
        before = jq.load(build(nodes, arrays, x=shape))
        return before, STRUCTURE[name](before)

    @pytest.mark.parametrize(
        ("order", "bias"), [(("m", "b"), None), (("b", "m"), None), (("m", "b"), normal(1, 5))], ids=str
    )
    def test_matrices_become_gemm(self, order, bias):
        before, after = self.rewritten("matmul_to_gemm", (2, 8), order, bias)
        assert ops(after) == ["Gemm", "Relu"]
        same(before, after, (2, 8))

    def test_stacks_become_gemm_between_reshapes(self):
        before, after = self.rewritten("matmul_to_gemm", (2, 3, 8))
        assert ops(after) == ["Reshape", "Gemm", "Reshape", "Relu"]
        same(before, after, (2, 3, 8))

    def test_free_rows_are_another_rewrite(self):
        before, after = self.rewritten("matmul_to_gemm", ("N", 8))
        assert after is before
        before, after = self.rewritten("dynamic_matmul_to_gemm", ("N", 8))
        assert ops(after) == ["Gemm", "Relu"]
        same(before, after, (3, 8))
        before, after = self.rewritten("dynamic_matmul_to_gemm", ("N", 3, 8))
        assert after is before

    def test_nodes_have_names_of_their_own(self):
        nodes = [
            node("Relu", ["x"], ["r"], name="m_pre_reshape"),
            node("MatMul", ["r", "w"], ["m"]),
            node("Add", ["m", "b"], ["y"]),
        ]
        before = jq.load(build(nodes, self.ARRAYS, x=(2, 3, 8)))
        after = STRUCTURE["matmul_to_gemm"](before)
        assert len({n.name for n in after.nodes}) == len(after.nodes) == 4
        same(before, after, (2, 3, 8))

    @pytest.mark.parametrize(
        "bias", [normal(1), normal(2, 5), normal(5, 1)[:2], normal(1, 1, 5)], ids=lambda b: str(b.shape)
    )
    def test_other_sums_stay(self, bias):
        before, after = self.rewritten("matmul_to_gemm", (2, 8), bias=bias)
        assert after is before
