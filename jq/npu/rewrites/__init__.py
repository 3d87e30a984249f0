"""Rewrites that AMD's NPU needs: the operators that it has, and the numbers that it computes in them.

`STRUCTURE` holds rewrites made before calibration. They leave what the graph computes, and are done once
nothing of their kind is left. `FORMS` holds those made after it: the float graph then computes what the chip
does, where the chip multiplies by the nearest of its constants. The tensors that they put in are never
quantized: the tensor of the original name is the one that leaves the operator. A second application changes nothing.

Both are in the order in which they are applied; the names are those that a configuration uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jq.npu.rewrites.activations import (
    clip_to_relu,
    hard_sigmoid_to_clip,
    hard_swish_to_product,
    leaky_relu_alpha,
    sigmoid_to_hard_sigmoid,
)
from jq.npu.rewrites.batchnorm import batchnorm_to_conv, depthwise_to_dense
from jq.npu.rewrites.concats import flat_concat
from jq.npu.rewrites.edits import Applies, Rewrite, everywhere
from jq.npu.rewrites.factors import (
    average_pool_factor,
    hard_sigmoid_factor,
    rectangular_pool_factor,
    reduce_mean_factor,
)
from jq.npu.rewrites.moves import gather_to_slice, transpose_in_four
from jq.npu.rewrites.pads import pad_by_ones, pad_to_pool
from jq.npu.rewrites.pools import reduce_mean_to_flat_pool, reduce_mean_to_pool, split_large_pool
from jq.npu.rewrites.products import dynamic_matmul_to_gemm, matmul_to_gemm
from jq.npu.rewrites.resizes import resize_to_depth_to_space, resize_to_matmul
from jq.npu.rewrites.shuffles import shuffle_to_conv, shuffle_to_weights
from jq.npu.rewrites.splits import split_to_slice

__all__ = ["FORMS", "FUNCTIONS", "KEEPS_WHOLE", "NOT_QUARKS", "STRUCTURE", "Applies", "Rewrite", "everywhere"]

STRUCTURE: Mapping[str, Rewrite] = MappingProxyType(
    {
        "reduce_mean_to_pool": reduce_mean_to_pool,
        "reduce_mean_to_flat_pool": reduce_mean_to_flat_pool,
        "split_large_pool": split_large_pool,
        "split_to_slice": split_to_slice,
        "batchnorm_to_conv": batchnorm_to_conv,
        "depthwise_to_dense": depthwise_to_dense,
        "shuffle_to_weights": shuffle_to_weights,
        "shuffle_to_conv": shuffle_to_conv,
        "transpose_in_four": transpose_in_four,
        "gather_to_slice": gather_to_slice,
        "clip_to_relu": clip_to_relu,
        "hard_sigmoid_to_clip": hard_sigmoid_to_clip,
        "resize_to_matmul": resize_to_matmul,
        "resize_to_depth_to_space": resize_to_depth_to_space,
        "pad_to_pool": pad_to_pool,
        "pad_by_ones": pad_by_ones,
        "flat_concat": flat_concat,
        "hard_swish_to_product": hard_swish_to_product,
        "matmul_to_gemm": matmul_to_gemm,
        "dynamic_matmul_to_gemm": dynamic_matmul_to_gemm,
    }
)

# Forms that change what an activation computes: the constraints are those of the operator that it becomes.
FUNCTIONS = ("leaky_relu_alpha", "sigmoid_to_hard_sigmoid")
# What keeps a network in one piece on the chip, and is made where the configuration asks for that.
KEEPS_WHOLE = (
    "reduce_mean_to_flat_pool", "depthwise_to_dense", "shuffle_to_weights", "shuffle_to_conv", "transpose_in_four",
    "gather_to_slice", "clip_to_relu", "hard_sigmoid_to_clip", "resize_to_matmul", "resize_to_depth_to_space",
    "pad_to_pool", "pad_by_ones", "flat_concat",
)  # fmt: skip
# What suits the chip and Quark does not do.
NOT_QUARKS = ("dynamic_matmul_to_gemm", "rectangular_pool_factor", *KEEPS_WHOLE)

FORMS: Mapping[str, Rewrite] = MappingProxyType(
    {
        "leaky_relu_alpha": leaky_relu_alpha,
        "sigmoid_to_hard_sigmoid": sigmoid_to_hard_sigmoid,
        "hard_sigmoid_factor": hard_sigmoid_factor,
        "average_pool_factor": average_pool_factor,
        "rectangular_pool_factor": rectangular_pool_factor,
        "reduce_mean_factor": reduce_mean_factor,
    }
)
