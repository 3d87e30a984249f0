"""Block formats and small floats: bit for bit what the formulas say, in float64 one value after the other."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from jq.arithmetic.blocks import cast
from jq.arithmetic.formats import BFLOAT16, BFP16, BLOCKS, FLOAT16, FLOATS, MX4, MX6, MX9, Block, Float, Rounding
from jq.errors import Error
from jq.ops.blocks import QUARK, block_of, node_of
from tests.conftest import one_node, outputs

SHAPE = (2, 37)  # whole blocks and a rest, of every size
VARIANTS: list[Block] = [
    *BLOCKS.values(),
    *(dataclasses.replace(b, rounding=r) for b in (BFP16, MX6, BLOCKS["mxint8"]) for r in ("half_away", "half_up")),
    *(
        block_of("BFPQuantizeDequantize", attributes)[0]
        for attributes in (
            {"rounding_mode": 2, "use_compiler_version_cpu_kernel": 1},
            {"rounding_mode": 0, "use_compiler_version_cpu_kernel": 1},
            {"rounding_mode": 2, "convert_to_bfloat_before_bfp": 1},
            {"bit_width": 10},
            {"bit_width": 32, "rounding_mode": 1},
            {"bfp_method": "to_bfp_prime", "block_size": 12, "sub_block_size": 4, "sub_block_shift_bits": 2},
        )
    ),
]

# ---------------------------------------------------------------------------------------------
# The oracle: one value after the other, in float64, which holds every float32 and every step exactly
# ---------------------------------------------------------------------------------------------

SMALL = {
    "fp8_e5m2": (ml_dtypes.float8_e5m2, 15, 57344.0),
    "fp8_e4m3": (ml_dtypes.float8_e4m3fn, 8, 448.0),
    "fp6_e3m2": (ml_dtypes.float6_e3m2fn, 4, 28.0),
    "fp6_e2m3": (ml_dtypes.float6_e2m3fn, 2, 7.5),
    "fp4_e2m1": (ml_dtypes.float4_e2m1fn, 2, 6.0),
}


def nearest(value: float, rounding: Rounding) -> float:
    if rounding == "half_even":
        return float(round(value))
    if rounding == "half_up":
        return float(math.floor(value + 0.5))
    return math.copysign(math.floor(abs(value) + 0.5), value)


def exponent(value: float) -> int:
    """Unbiased; -127 for zero, subnormal values and what is not finite."""
    return max(math.frexp(value)[1] - 1, -127) if value and math.isfinite(value) else -127


def clamp(value: float, low: float, high: float) -> float:
    return max(low, min(high, value))


def bfp(block: list[float], fmt: Block, bits: int) -> list[float]:
    top = max(map(exponent, block))
    step = 2.0 ** (top - bits + 1)
    if fmt.raises and any(nearest(v / step, fmt.rounding) >= 2**bits for v in block if math.isfinite(v)):
        step *= 2
    high = 2**bits - 1
    low = -(2**bits) if fmt.raises else -high
    return [clamp(nearest(v / step, fmt.rounding), low, high) * step if math.isfinite(v) else v for v in block]


def bfp_prime(block: list[float], fmt: Block, bits: int) -> list[float]:
    if not all(map(math.isfinite, block)):
        return [math.nan] * len(block)
    top, result = max(map(exponent, block)), []
    for start in range(0, len(block), fmt.sub_size):
        part = block[start : start + fmt.sub_size]
        step = 2.0 ** (top - min(top - max(map(exponent, part)), 2**fmt.shift_bits - 1) - bits + 1)
        normal = [0.0 if exponent(v) == -127 else v for v in part]
        result += [clamp(nearest(v / step, fmt.rounding), 1 - 2**bits, 2**bits - 1) * step for v in normal]
    return result


def mx(block: list[float], fmt: Block) -> list[float]:
    top = max(map(exponent, block))
    if fmt.element.name == "int8":
        step = 2.0 ** (top - 6)
        return [clamp(nearest(v / step, fmt.rounding), -128, 127) * step if math.isfinite(v) else v for v in block]
    dtype, emax, largest = SMALL[fmt.element.name]
    scale = 2.0 ** (top - emax)

    def element(v: float) -> float:
        return float(np.float32(clamp(v / scale, -largest, largest)).astype(dtype)) * scale

    return [element(v) if math.isfinite(v) else v for v in block]


@np.errstate(over="ignore", invalid="ignore")
def oracle(x: np.ndarray, fmt: Block) -> np.ndarray:
    """Along the last axis."""
    x = x.astype(ml_dtypes.bfloat16).astype(np.float32) if fmt.through_bfloat16 else x
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % fmt.size)]).reshape(-1, fmt.size)
    one = {
        "bfp": functools.partial(bfp, bits=fmt.element.bits - 1),
        "bfp_prime": functools.partial(bfp_prime, bits=fmt.element.bits - 1),
        "mx": mx,
    }[fmt.kind]
    rows = np.array([one(row, fmt=fmt) for row in padded.astype(np.float64).tolist()], np.float64)
    return rows.astype(np.float32).reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]


@st.composite
def tensors(draw: st.DrawFn, specials: bool = True) -> np.ndarray:
    """Neighbouring exponents, significands of few bits (ties) or of ones (what rounds up), zeros, NaN, anything."""
    count = math.prod(SHAPE)
    noise = np.frombuffer(draw(st.binary(min_size=6 * count, max_size=6 * count)), np.uint16).reshape(3, *SHAPE)
    noise = noise.astype(np.int32)
    around, spread = draw(st.integers(0, 254)), draw(st.sampled_from([0, 2, 9, 40]))
    exponents = np.clip(around - noise[0] % (spread + 1), 0, 254)
    kept = draw(st.integers(1, 23))
    significands = (noise[1] << 7 | noise[2] & 0x7F) >> (23 - kept) << (23 - kept)
    significands |= draw(st.sampled_from([0, 0, 1, 0x7FFFFF >> kept << kept]))
    x = ((exponents << 23) | significands).view(np.float32)
    x = np.where(noise[2] & 0x80, -x, x)
    values = np.array([0, 0, 0, -0.0, 1e-45, -1e-45, np.nan, np.inf, -np.inf], np.float32)[: None if specials else 6]
    places = noise[2] >> 8
    return np.where(places < len(values), values[places % len(values)], x) if draw(st.booleans()) else x


@functools.cache
def compiled(fmt: Block | Float, axis: int) -> Any:
    return jax.jit(functools.partial(cast, fmt=fmt, axis=axis))


@pytest.mark.parametrize("fmt", VARIANTS, ids=lambda f: f"{f.name}-{f.rounding}")
@settings(max_examples=60, deadline=None)
@given(x=tensors())
def test_blocks_are_what_the_formulas_say(fmt: Block, x: np.ndarray) -> None:
    have = np.asarray(compiled(fmt, 1)(x))
    assert have.dtype == np.float32
    np.testing.assert_array_equal(have, oracle(x, fmt))


@settings(max_examples=60, deadline=None)
@given(x=tensors())
def test_floats_are_rounded_as_by_ml_dtypes(x: np.ndarray) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(compiled(BFLOAT16, 1)(x), x.astype(ml_dtypes.bfloat16).astype(np.float32))
        halves = np.clip(x, -65504, 65504).astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(compiled(FLOAT16, 1)(x), halves)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_value_of_a_float_type_stays_and_every_middle_goes_to_the_even_one(dtype: Any) -> None:
    fmt = FLOATS[np.dtype(dtype).name]
    values = np.arange(1 << 15, dtype=np.uint16).view(dtype).astype(np.float32)
    values = values[np.isfinite(values)]
    middles = ((values[:-1].astype(np.float64) + values[1:]) / 2).astype(np.float32)
    for x in (
        values,
        -values,
        middles,
        np.nextafter(middles, np.float32(np.inf)),
        np.nextafter(middles, np.float32(0)),
    ):
        np.testing.assert_array_equal(cast(x, fmt, 0), x.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("fmt", [b for b in BLOCKS.values() if b.element.lowest == -b.element.largest], ids=repr)
@settings(max_examples=30, deadline=None)
@given(x=tensors(specials=False))
def test_what_a_block_holds_it_holds_again(fmt: Block, x: np.ndarray) -> None:
    """But for MXINT8: code -128 is a power of two, so that the next time the block's exponent is one higher."""
    once = np.asarray(compiled(fmt, 1)(np.clip(x, -1e38, 1e38)))
    np.testing.assert_array_equal(compiled(fmt, 1)(once), once)


@pytest.mark.parametrize("fmt", BLOCKS.values(), ids=repr)
def test_blocks_lie_along_the_axis_and_neighbours_do_not_matter(fmt: Block, rng: np.random.Generator) -> None:
    x = rng.normal(size=(3, 37, 5)).astype(np.float32) * np.exp2(rng.integers(-9, 9, (3, 37, 5))).astype(np.float32)
    want = np.moveaxis(oracle(np.moveaxis(x, 1, -1), fmt), -1, 1)
    np.testing.assert_array_equal(cast(x, fmt, 1), want)
    np.testing.assert_array_equal(cast(x, fmt, -2), want)
    np.testing.assert_array_equal(jax.vmap(lambda row: cast(row, fmt, 0))(x), want)


def test_by_hand() -> None:
    """BFP16: 2**0 is the block's exponent, so that steps are 2**-6, and 1.999 would be code 128."""
    x = np.array([1.999, 1 / 128, 3 / 128, -1 / 128, -1.0, 0.3, 0, -1.999], np.float32)
    want = np.array([127, 0, 2, 0, -64, 19, 0, -127]) / 64
    np.testing.assert_array_equal(cast(x, BFP16, 0), want)
    raised = block_of("BFPQuantizeDequantize", {"rounding_mode": 2, "use_compiler_version_cpu_kernel": 1})[0]
    np.testing.assert_array_equal(cast(x, raised, 0), np.array([64, 0, 1, 0, -32, 10, 0, -64]) / 32)
    # MX6 has steps of 2**-3 in the first pair, of 2**-4 in the others; MX4 of 2**-1 and 2**-2.
    x = np.array([1.0, 0.19, 0.19, 0.9, 1.9, 0.1] + [0] * 10, np.float32)
    np.testing.assert_array_equal(cast(x, MX6, 0)[:6], [1.0, 0.25, 0.1875, 0.875, 1.875, 0.125])
    np.testing.assert_array_equal(cast(x, MX4, 0)[:6], [1.0, 0.0, 0.25, 0.75, 1.5, 0.0])
    # E4M3: 500 becomes the largest, 448, although 512 is as near; 2**-10 is a tie with zero below the subnormals.
    np.testing.assert_array_equal(
        cast(np.array([500, -0.75, 2**-10, 3 * 2**-10]), BLOCKS["mxfp8e4m3"], 0), [448, -0.75, 0, 2**-8]
    )
    np.testing.assert_array_equal(cast(np.array([7.0, 2.5, -3.5, 0.25]), BLOCKS["mxfp4e2m1"], 0), [6, 2, -4, 0])
    np.testing.assert_array_equal(cast(np.array([-255.9, 255.9, 3.0]), BLOCKS["mxint8"], 0), [-256, 254, 4])


def test_special_values_and_the_ends_of_float32() -> None:
    big = np.finfo(np.float32).max
    x = np.array([np.inf, np.nan, -np.inf, 1.0, 0.1], np.float32)
    np.testing.assert_array_equal(cast(x, BFP16, 0), np.array([np.inf, np.nan, -np.inf, 1, 6 / 64], np.float32))
    assert np.isnan(cast(x, MX9, 0)).all()
    np.testing.assert_array_equal(cast(np.array([big, -big]), BFP16, 0), [127 * 2.0**121, -127 * 2.0**121])
    np.testing.assert_array_equal(cast(np.array([big, -big]), BLOCKS["mxint8"], 0), [127 * 2.0**121, -np.inf])
    np.testing.assert_array_equal(cast(np.array([65520.0, -np.inf]), FLOAT16, 0), [65504, -65504])
    np.testing.assert_array_equal(cast(np.array([big, -np.inf]), BFLOAT16, 0), [np.inf, -np.inf])
    tiny = np.array([2.0**-127, 2.0**-133, 2.0**-134, 2.0**-149], np.float32)
    np.testing.assert_array_equal(cast(tiny, BFP16, 0), np.array([2.0**-127, 2.0**-133, 0, 0], np.float32))
    assert not np.any(cast(tiny, MX9, 0))
    assert np.signbit(cast(np.array([-0.0, -1e-9, 1.0]), BFP16, 0)).tolist() == [True, True, False]


def test_nothing_to_round() -> None:
    assert cast(np.zeros((2, 0), np.float32), BLOCKS["mxint8"], 1).shape == (2, 0)
    assert cast(np.zeros((0, 9), np.float32), BFP16, 1).shape == (0, 9)


# ---------------------------------------------------------------------------------------------
# The operators
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", VARIANTS, ids=lambda f: f"{f.name}-{f.rounding}")
def test_a_node_says_its_format(fmt: Block, rng: np.random.Generator) -> None:
    op_type, domain, attributes = node_of(fmt, -2)
    found, axis = block_of(op_type, attributes)
    assert (dataclasses.replace(found, name=fmt.name), axis) == (fmt, -2)
    assert found.name == fmt.name or fmt.name in BLOCKS
    x = rng.normal(size=(3, 20, 4)).astype(np.float32)
    (have,) = outputs(one_node(op_type, {"x": x}, domain=domain, **attributes), {"x": x})
    np.testing.assert_array_equal(have, cast(x, fmt, 1))


@pytest.mark.parametrize("name", BLOCKS)
def test_a_named_format_comes_back_as_itself(name: str) -> None:
    assert block_of(node_of(BLOCKS[name], 1)[0], node_of(BLOCKS[name], 1)[2])[0] is BLOCKS[name]


def test_attributes_are_as_quark_writes_them() -> None:
    assert node_of(BFP16, 0) == (
        "BFPQuantizeDequantize",
        "com.amd.quark",
        {
            "bfp_method": "to_bfp", "axis": 0, "bit_width": 16, "block_size": 8, "rounding_mode": 2,
            "sub_block_size": 2, "sub_block_shift_bits": 1, "convert_to_bfloat_before_bfp": 0,
        },
    )  # fmt: skip
    widths = {f.name: node_of(f, 1)[2]["bit_width"] for f in (MX9, MX6, MX4)}
    assert widths == {"mx9": 16, "mx6": 13, "mx4": 11}


@pytest.mark.parametrize(
    ("op_type", "domain"),
    [
        ("BFPQuantizeDequantize", QUARK),
        ("MXQuantizeDequantize", QUARK),
        ("BFPFixNeuron", "com.vai.quantize"),
        ("MXFixNeuron", "com.vai.quantize"),
    ],
)
def test_defaults_single_elements_and_vectors(op_type: str, domain: str, rng: np.random.Generator) -> None:
    fmt = block_of(op_type, {})[0]
    assert (fmt.rounding, fmt.size) == ("half_away", 8 if op_type[0] == "B" else 32)

    def run(x: np.ndarray) -> np.ndarray:
        return outputs(one_node(op_type, {"x": x}, domain=domain), {"x": x})[0]

    one, vector = np.full((1, 1), 0.3337, np.float32), rng.normal(size=19).astype(np.float32)
    np.testing.assert_array_equal(run(one), one)
    np.testing.assert_array_equal(run(vector), cast(vector, fmt, 0))
    half = rng.normal(size=(2, 9)).astype(np.float16)
    np.testing.assert_array_equal(run(half), np.asarray(cast(half, fmt, 1)).astype(np.float16))


@pytest.mark.parametrize(
    ("op_type", "attributes", "message"),
    [
        ("BFPQuantizeDequantize", {"bfp_method": "to_bf"}, "bfp_method is 'to_bf'"),
        ("BFPQuantizeDequantize", {"bit_width": 9}, "bit_width is 9"),
        ("BFPQuantizeDequantize", {"rounding_mode": 3}, "rounding_mode is 3"),
        ("BFPQuantizeDequantize", {"block_size": 0}, "block has 0 elements"),
        ("BFPQuantizeDequantize", {"bfp_method": "to_bfp_prime", "sub_block_size": 3}, "sub_block_size 3"),
        ("BFPQuantizeDequantize", {"bit_width": 12, "use_compiler_version_cpu_kernel": 1}, "needs 16"),
        ("MXQuantizeDequantize", {"element_dtype": "fp8"}, "element_dtype is 'fp8'"),
    ],
)
def test_what_the_library_does_not_know_is_said(op_type: str, attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(Error, match=message):
        block_of(op_type, attributes)
    x = np.ones((2, 8), np.float32)
    with pytest.raises(Error, match=message):
        outputs(one_node(op_type, {"x": x}, domain=QUARK, **attributes), {"x": x})


def _pair(x: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, axis: int = 1) -> np.ndarray:
    """Through both of the extended operators."""
    nodes = [
        helper.make_node(f"Extended{name}", [data, "s", "z"], [result], domain=QUARK, axis=axis)
        for name, data, result in (("QuantizeLinear", "x", "q"), ("DequantizeLinear", "q", "y"))
    ]
    x_info = helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)
    y_info = helper.make_tensor_value_info("y", TensorProto.FLOAT, x.shape)
    initializers = [numpy_helper.from_array(scale, "s"), numpy_helper.from_array(zero_point, "z")]
    graph = helper.make_graph(nodes, "pair", [x_info], [y_info], initializers)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(QUARK, 1)]
    return outputs(helper.make_model(graph, opset_imports=opsets, ir_version=10), {"x": x})[0]


@pytest.mark.parametrize("fmt", FLOATS.values(), ids=repr)
def test_the_extended_pair_rounds_to_floats(fmt: Float, rng: np.random.Generator) -> None:
    """Also under jit, where XLA would drop a conversion there and back."""
    x = np.concatenate([rng.normal(size=200), [1e30, -1e5, 2.0**-130, np.inf]]).astype(np.float32).reshape(4, 51)
    np.testing.assert_array_equal(_pair(x, np.float32(1), np.zeros((), fmt.dtype)), cast(x, fmt, 0))


def test_the_extended_pair_scales_bfloat16(rng: np.random.Generator) -> None:
    x, scale = rng.normal(size=(3, 5)).astype(np.float32), np.array([0.3, 1, 7], np.float32)
    zero_point = np.array([0, 1, -2], ml_dtypes.bfloat16)
    columns, zeros = scale[:, None], zero_point.astype(np.float32)[:, None]
    quantized = (x / columns + zeros).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(_pair(x, scale, zero_point, axis=0), (quantized - zeros) * columns)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32])
def test_the_extended_pair_takes_integers(dtype: Any, rng: np.random.Generator) -> None:
    x, scale = rng.normal(size=(4, 3)).astype(np.float32) * 9, np.array([0.5, 0.25, 2], np.float32)
    info = np.iinfo(dtype)
    codes = np.clip(np.rint(x.astype(np.float64) / scale), info.min, info.max)
    np.testing.assert_array_equal(_pair(x, scale, np.zeros(3, dtype)), codes * scale)


def test_after_a_convolution_the_axis_is_that_of_onnx(rng: np.random.Generator) -> None:
    w, x = rng.normal(size=(9, 3, 1, 1)).astype(np.float32), rng.normal(size=(2, 3, 4, 5)).astype(np.float32)
    op_type, domain, attributes = node_of(BFP16, 1)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node(op_type, ["c"], ["y"], domain=domain, **attributes),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, (2, 9, 4, 5)) for n in ("c", "y")],
        [numpy_helper.from_array(w, "w")],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(QUARK, 1)]
    c, y = outputs(helper.make_model(graph, opset_imports=opsets, ir_version=10), {"x": x})
    np.testing.assert_array_equal(y, cast(c, BFP16, 1))


def test_nothing_is_differentiated_through() -> None:
    assert not jnp.any(jax.grad(lambda x: cast(x, BFP16, 0).sum())(jnp.ones(8)))
