"""Operands of different scales on one grid: sums, differences and extremes of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jq.arithmetic.numerics import WIDEST
from jq.npu.targets import Target
from jq.ops.integer.fixed import Fixed, position

Array = Any


def aligned(operands: Sequence[Fixed], combine: Callable[[list[Array]], Array], target: Target) -> Fixed:
    """Return the operands combined on the finest of their grids, but finer than the coarsest by no more bits than the
    chip has guard bits. Bits below that are cut off.
    """
    if not all(isinstance(x, Fixed) and x.is_codes and x.is_dyadic for x in operands):
        return NotImplemented
    scales = [x.scale for x in operands]
    finest, coarsest = min(scales), max(scales)
    scale = finest if target.add_guard is None else max(finest, coarsest / 2**target.add_guard)
    shifts = [position(scale) - position(x.scale) for x in operands]  # to the left
    bound = sum(x.bound << s if s > 0 else x.bound for x, s in zip(operands, shifts, strict=True))
    if bound >= WIDEST:
        return NotImplemented
    parts = [_shifted(x.integers(), s) for x, s in zip(operands, shifts, strict=True)]
    causes = frozenset({"guard bit"} if scale > finest else ())
    return Fixed(combine(parts), scale, bound, causes=causes)


def _shifted(v: Array, left: int) -> Array:
    return v << left if left > 0 else v >> -left if left < 0 else v
