"""The operators of AMD Quark's custom-op library for formats that ONNX has no operator for.

Each pair of names is one operator: the library answers to those of its predecessor too.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jq.arithmetic.blocks import cast
from jq.arithmetic.formats import BFP16, BLOCKS, ELEMENTS, FLOATS, MX9, MXINT8, Block, Integer, Rounding, magnitude
from jq.arithmetic.numerics import divide, fake_quant, power_of_two
from jq.errors import ModelError, UnsupportedOp
from jq.graph.domains import CONTRIB, QUARK, VITIS
from jq.ops.quant import aligned, dequantize_linear, quantize_linear
from jq.ops.table import Array, op

_ROUNDINGS: tuple[Rounding, ...] = ("half_away", "half_up", "half_even")  # as the attribute `rounding_mode` counts them
_HEADER = 9  # bits of `bit_width` that are no magnitude: the sign and the shared exponent
_WIDEST = 32  # `bit_width` whose finest step float32 can still hold


# --- Formats as nodes ---


def node_of(fmt: Block, axis: int) -> tuple[str, str, dict[str, Any]]:
    """Return operator, domain and attributes of the node that Quark writes for a block format.

    >>> from jq.arithmetic.formats import MXFP4E2M1
    >>> node_of(MXFP4E2M1, 1)[2]
    {'element_dtype': 'fp4_e2m1', 'axis': 1, 'block_size': 32, 'rounding_mode': 2}
    """
    shared = {"axis": axis, "block_size": fmt.size, "rounding_mode": _ROUNDINGS.index(fmt.rounding)}
    if fmt.kind == "mx":
        return "MXQuantizeDequantize", QUARK, {"element_dtype": fmt.element.name, **shared}
    attributes = {
        "bfp_method": f"to_{fmt.kind}",
        "axis": axis,
        "bit_width": fmt.element.fraction + 1 + _HEADER,
        **shared,
        # The plain method has no sub-blocks: then the library's defaults stand here, as Quark writes them.
        "sub_block_size": fmt.sub_size if fmt.kind == "bfp_prime" else MX9.sub_size,
        "sub_block_shift_bits": fmt.shift_bits if fmt.kind == "bfp_prime" else MX9.shift_bits,
        "convert_to_bfloat_before_bfp": int(fmt.through_bfloat16),
    }
    return "BFPQuantizeDequantize", QUARK, attributes | ({"use_compiler_version_cpu_kernel": 1} if fmt.raises else {})


def block_of(op_type: str, attributes: Mapping[str, Any]) -> tuple[Block, int]:
    """Return the block format and the axis of a node of Quark's: the inverse of `node_of`.

    Missing attributes are what the library takes them for.

    >>> block_of("BFPQuantizeDequantize", {"bit_width": 16, "rounding_mode": 2})
    (bfp16, 1)
    """
    make = _mx if op_type in ("MXQuantizeDequantize", "MXFixNeuron") else _bfp
    known = inspect.signature(make).parameters.keys() & attributes.keys() - {"axis"}
    fmt = make(**{name: attributes[name] for name in known})
    named = (b for b in BLOCKS.values() if dataclasses.replace(fmt, name=b.name) == b)
    return next(named, fmt), attributes.get("axis", 1)


def _mx(element_dtype: str = "int8", block_size: int = MXINT8.size, rounding_mode: int = 0) -> Block:
    if element_dtype not in ELEMENTS:
        raise UnsupportedOp(f"element_dtype is {element_dtype!r}; expected one of {', '.join(ELEMENTS)}")
    element = ELEMENTS[element_dtype]
    # The library rounds floats half to even whatever it is told.
    rounding = _rounding(rounding_mode) if element.emin == element.emax else "half_even"
    return Block(f"mx:{element_dtype}:{block_size}:{rounding}", "mx", _size(block_size), element, rounding)


def _bfp(
    bfp_method: str = "to_bfp", bit_width: int = 16, block_size: int = BFP16.size, rounding_mode: int = 0,
    sub_block_size: int = MX9.sub_size, sub_block_shift_bits: int = MX9.shift_bits,
    convert_to_bfloat_before_bfp: int = 0, use_compiler_version_cpu_kernel: int = 0,
) -> Block:  # fmt: skip
    if not _HEADER < bit_width <= _WIDEST:
        raise UnsupportedOp(f"bit_width is {bit_width}; expected {_HEADER + 1} to {_WIDEST}")
    fmt = Block("", "bfp", _size(block_size), magnitude(bit_width - _HEADER), _rounding(rounding_mode))
    fmt = dataclasses.replace(fmt, through_bfloat16=bool(convert_to_bfloat_before_bfp))
    if bfp_method in ("to_bfp_prime", "to_bfp_prime_shared"):
        if _size(sub_block_size) > block_size or block_size % sub_block_size or not 0 <= sub_block_shift_bits <= 8:
            raise ModelError(
                f"sub_block_size {sub_block_size} must divide block_size {block_size}, and sub_block_shift_bits "
                f"{sub_block_shift_bits} must be 0 to 8"
            )
        fmt = dataclasses.replace(
            fmt, kind="bfp_prime", sub_size=sub_block_size, shift_bits=sub_block_shift_bits, flushes=True, poisons=True
        )
    elif bfp_method != "to_bfp":
        raise UnsupportedOp(f"bfp_method is {bfp_method!r}; expected to_bfp or to_bfp_prime")
    elif use_compiler_version_cpu_kernel:
        if bit_width != BFP16.element.fraction + 1 + _HEADER:
            raise UnsupportedOp(f"bit_width is {bit_width}; use_compiler_version_cpu_kernel needs 16")
        fmt = dataclasses.replace(fmt, raises=True, element=dataclasses.replace(fmt.element, lowest=-2.0))
    details = (bit_width, block_size, fmt.rounding, fmt.sub_size, fmt.shift_bits, fmt.raises, fmt.through_bfloat16)
    return dataclasses.replace(fmt, name=":".join(map(str, (fmt.kind, *details))))


def _rounding(mode: int) -> Rounding:
    if mode not in range(len(_ROUNDINGS)):
        raise UnsupportedOp(f"rounding_mode is {mode}; expected 0 to {len(_ROUNDINGS) - 1}")
    return _ROUNDINGS[mode]


def _size(size: int) -> int:
    if size < 1:
        raise ModelError(f"a block has {size} elements; expected at least one")
    return size


# --- Rules ---


@op("BFPFixNeuron", domain=VITIS, layout=("axis",))
@op("BFPQuantizeDequantize", domain=QUARK, layout=("axis",))
def bfp_quantize_dequantize(
    X: Array, *, bfp_method: str = "to_bfp", axis: int = 1, bit_width: int = 16, block_size: int = 8,
    rounding_mode: int = 0, sub_block_size: int = 2, sub_block_shift_bits: int = 1,
    convert_to_bfloat_before_bfp: int = 0, use_compiler_version_cpu_kernel: int = 0,
) -> Array:  # fmt: skip
    fmt = _bfp(
        bfp_method, bit_width, block_size, rounding_mode, sub_block_size, sub_block_shift_bits,
        convert_to_bfloat_before_bfp, use_compiler_version_cpu_kernel,
    )  # fmt: skip
    return _quantize_dequantize(X, fmt, axis)


@op("MXFixNeuron", domain=VITIS, layout=("axis",))
@op("MXQuantizeDequantize", domain=QUARK, layout=("axis",))
def mx_quantize_dequantize(
    X: Array, *, element_dtype: str = "int8", axis: int = 1, block_size: int = 32, rounding_mode: int = 0
) -> Array:
    return _quantize_dequantize(X, _mx(element_dtype, block_size, rounding_mode), axis)


def _quantize_dequantize(x: Array, fmt: Block, axis: int) -> Array:
    """The library leaves a single element as it is, and has no axis to choose where there is one."""
    if x.size == 1:
        return cast(x, FLOATS["bfloat16"], 0).astype(x.dtype) if fmt.through_bfloat16 else x
    if x.ndim > 1 and not -x.ndim <= axis < x.ndim:
        raise ModelError(f"axis {axis} does not exist in a tensor of shape {x.shape}")
    return cast(x.astype(jnp.float32), fmt, axis if x.ndim > 1 else 0).astype(x.dtype)


@op("FixNeuron", domain=CONTRIB)
def fix_neuron(
    x: Array, scale: Array | None = None, zero_point: Array | None = None, *, bit_width: int = 8, pos: int = 0
) -> Array:
    """Rounded to signed integers of `bit_width` bits at a position; AMD's compiler reads the attributes alone."""
    if not 1 <= bit_width <= _WIDEST:
        raise UnsupportedOp(f"bit_width is {bit_width}; expected 1 to {_WIDEST}")
    most = 2 ** (bit_width - 1)
    return fake_quant(x, power_of_two(-pos), 0, Integer(bit_width, True, -most, most - 1))


@op("VitisQuantizeLinear", domain=VITIS, layout=("axis",))
@op("ExtendedQuantizeLinear", domain=QUARK, layout=("axis",))
def extended_quantize_linear(x: Array, y_scale: Array, y_zero_point: Array, *, axis: int = 1) -> Array:
    """As QuantizeLinear, and to the floating-point type of the zero point."""
    fmt = FLOATS.get(str(y_zero_point.dtype))
    if fmt is None:
        return quantize_linear(x, y_scale, y_zero_point, axis=axis)
    if not fmt.saturates:  # the library's float16 is a cast alone
        scale, zero = aligned(y_scale, x, axis), aligned(y_zero_point, x, axis).astype(jnp.float32)
        # Where nothing changes nothing is computed, because XLA would flush subnormal values.
        x = jnp.where(scale == 1, x, divide(x, scale))
        x = jnp.where(zero == 0, x, x + zero)
    # Rounded before the conversion, of which XLA may keep the excess precision.
    return cast(x, fmt, 0).astype(fmt.dtype)


@op("VitisDequantizeLinear", domain=VITIS, layout=("axis",))
@op("ExtendedDequantizeLinear", domain=QUARK, layout=("axis",))
def extended_dequantize_linear(x: Array, x_scale: Array, x_zero_point: Array, *, axis: int = 1) -> Array:
    """As DequantizeLinear, and from a floating-point type."""
    fmt = FLOATS.get(str(x_zero_point.dtype))
    if fmt is None:
        return dequantize_linear(x, x_scale, x_zero_point, axis=axis)
    x = x.astype(jnp.float32)
    if not fmt.saturates:
        scale, zero = aligned(x_scale, x, axis), aligned(x_zero_point, x, axis).astype(jnp.float32)
        x = jnp.where(zero == 0, x, x - zero)
        x = jnp.where(scale == 1, x, x * scale)
    return x
