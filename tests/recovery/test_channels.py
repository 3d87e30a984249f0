"""Statistics of channels: sums of one sample, as numpy has them."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jq.recovery.equalization.channels import _sums


@pytest.mark.parametrize(
    "shape", [(1, 7, 7, 160), (1, 17, 13, 5), (1, 1, 1, 12), (1, 97, 89, 33), (1, 112, 112, 16), (1, 0, 3, 4)]
)
@pytest.mark.parametrize("bound", [None, 2.0])
def test_sums_of_channels_are_numpys_whatever_the_size(
    shape: tuple[int, ...], bound: float | None, rng: np.random.Generator
) -> None:
    """By reductions of the library where tensors are small, in pieces where they are large."""
    x = rng.normal(0, 3, shape).astype(np.float32)
    x[rng.random(shape) < 0.1] = 0
    if bound is not None:
        x[:, :1, :1, :1] = -np.inf  # which the Clip makes zero
    sums = jax.jit(lambda v: _sums(bound, jax.numpy.moveaxis(v, -1, 1)))(x)
    rows = x.reshape(-1, shape[-1]).astype(np.float64)
    rows = rows if bound is None else np.maximum(rows, 0)
    cut = rows if bound is None else np.minimum(rows, bound)
    wanted = {"reach": np.abs(rows).max(0, initial=0), "total": cut.sum(0), "squares": np.square(cut).sum(0)}
    wanted |= {"active": (cut != 0).sum(0)}
    if bound is not None:
        over = np.maximum(rows - bound, 0)
        wanted |= {"over": over.sum(0), "beyond": np.square(over).sum(0)}
    assert sums.keys() == wanted.keys() | {"pixels"} and sums["pixels"] == len(rows)
    for kind, values in wanted.items():
        np.testing.assert_allclose(sums[kind], values, rtol=1e-4, atol=1e-3, err_msg=kind)
