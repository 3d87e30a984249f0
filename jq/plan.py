"""How tensors are quantized, as data."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jq.formats import Integer
from jq.numerics import exponent_of

Array = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class QParams:
    """Scale and zero point of one tensor, per tensor or along an axis: x is about (code - zero_point) * scale.

    A pytree: scale and zero point are its leaves, so that a plan of them can be stacked, mapped and differentiated.
    """

    scale: Array  # float32, one number or one per channel
    zero_point: Array  # int32, likewise
    grid: Integer = dataclasses.field(metadata={"static": True})
    axis: int | None = dataclasses.field(default=None, metadata={"static": True})

    def __repr__(self) -> str:
        of = "" if self.axis is None else f", axis={self.axis}"
        return f"QParams(scale={self.scale}, zero_point={self.zero_point}, {self.grid}{of})"

    @property
    def exponent(self) -> np.ndarray:
        """Of a power-of-two scale: scale = 2**exponent. The vendor's position is its negative."""
        return exponent_of(self.scale)
