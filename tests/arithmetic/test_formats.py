"""Formats as data: their names, their bounds and what ml_dtypes knows of the same types."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from jq.arithmetic import formats
from jq.arithmetic.formats import BLOCKS, FLOATS, INTEGERS, format_named
from jq.errors import ConfigError

ALL = [*INTEGERS.values(), *FLOATS.values(), *BLOCKS.values()]
SAME = {
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
}


@pytest.mark.parametrize("fmt", ALL, ids=repr)
def test_a_format_is_found_by_its_name_and_can_be_a_key(fmt: formats.Format) -> None:
    assert format_named(repr(fmt)) is format_named(fmt.name) is {fmt: fmt}[fmt]


def test_names_are_distinct() -> None:
    assert len({f.name for f in ALL}) == len(ALL)


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"mxfp4e2m1.*Did you mean 'mxfp8e4m3'"):
        format_named("MXFP8E4M3")
    with pytest.raises(ConfigError, match="Did you mean 'int4'"):
        format_named("Int4")


@pytest.mark.parametrize("grid", [g for g in INTEGERS.values() if g.bits >= 4], ids=repr)
def test_integers_have_the_bounds_of_their_type(grid: formats.Integer) -> None:
    info = ml_dtypes.iinfo(grid.dtype)
    assert (grid.qmin, grid.qmax, grid.bits) == (int(info.min), int(info.max), int(info.bits))
    assert grid.narrow.dtype == grid.dtype
    assert grid.narrow.qmin + grid.narrow.qmax == (0 if grid.signed else grid.qmax)


def test_four_bits() -> None:
    assert (formats.INT4.narrow.qmin, formats.INT4.middle, formats.UINT4.middle) == (-7, 0, 8)
    assert np.array([-8, 7], formats.INT4.dtype).astype(int).tolist() == [-8, 7]


@pytest.mark.parametrize(("name", "dtype"), SAME.items())
def test_elements_are_the_types_of_ml_dtypes(name: str, dtype: type) -> None:
    element, info = formats.ELEMENTS[name], ml_dtypes.finfo(dtype)
    assert (element.bits, element.fraction, element.emin) == (info.bits, info.nmant, info.minexp)
    assert (element.largest, element.lowest) == (float(info.max), float(info.min))
    assert 2.0**element.emax <= element.largest < 2.0 ** (element.emax + 1)


@pytest.mark.parametrize(
    ("name", "bits"),
    [("bfp16", 9), ("mx9", 9), ("mx6", 6), ("mx4", 4), ("mxint8", 8.25), ("mxfp6e2m3", 6.25), ("mxfp4e2m1", 4.25)],
)
def test_storage_of_blocks(name: str, bits: float) -> None:
    """The vendor's BFP16 counts the shared exponent with every element, its MX9 as stored."""
    assert BLOCKS[name].bits == bits
    assert BLOCKS[name].size % BLOCKS[name].sub_size == 0
