"""How a chip computes, as data: the interpreter takes it as an argument.

The values for AMD's NPU are those of the vendor's public reference emulators, not measurements of silicon.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Literal, get_args

from jq.arithmetic.numerics import Mode
from jq.errors import ConfigError, check_choice
from jq.npu.facts import RELU6, RELU6_POSITION, SIXTH, SLOPE, SLOPE_BITS


@dataclasses.dataclass(frozen=True)
class PartialSums:
    """16-bit partial sums: the input channels in two halves, each added up in chunks and rounded in between."""

    shift: int
    chunks: int  # in each half

    def __post_init__(self) -> None:
        if not (0 <= self.shift <= 16 and self.chunks >= 1):
            raise ConfigError(f"{self}: expected a shift of 0 to 16 bits and at least one chunk")


_BITS = {"bias_guard": 8, "add_guard": 16, "slope_shift": 16, "lerp_bits": 15}  # at most


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A chip's choices where chips differ. A fifth one is `dataclasses.replace(AIE2_X1, name=..., ...)`.

    >>> dataclasses.replace(AIE2_X1, name="floors", rounding="floor").rounding
    'floor'
    """

    name: str  # by which commands and reports call it
    rounding: Mode  # of what leaves an operator
    bias_guard: int | None = None  # bits that a bias keeps below the products' grid; None for all
    add_guard: int | None = None  # bits that the operands of a sum keep below the coarsest's grid; None for all
    reciprocals: bool = True  # means are a multiplication and a shift, and count the padding; else a division
    slope: Fraction | None = None  # of every LeakyRelu; None for the model's own
    slope_shift: int | None = None  # a slope is a whole number of 2**-slope_shift; None for the number as stored
    relu6: int | None = None  # the constant that stands for 6, at whatever position; None for 6 itself
    relu6_position: int = RELU6_POSITION  # the finest position at which that constant is applied
    hard_sigmoid: tuple[int, int] | None = None  # 1/6 as a multiplier and a shift; None for the float function
    lerp_bits: int | None = None  # of the weights of bilinear resizing; None for exact ones
    bfloat16_softmax: bool = False  # exponentials and products in bfloat16; else the float function
    requantize: Literal["shift", "significand", "float32"] = "shift"  # by a scale that is no power of two
    partial_sums: PartialSums | None = None  # sums that are rounded on the way; None: sums are exact

    def __post_init__(self) -> None:
        if self.rounding not in get_args(Mode):
            known = ", ".join(get_args(Mode))
            raise ConfigError(f"target {self.name!r}: unknown rounding {self.rounding!r}; expected one of {known}")
        if self.requantize not in ("shift", "significand", "float32"):
            known = "shift, significand or float32"
            raise ConfigError(f"target {self.name!r}: unknown requantize {self.requantize!r}; expected {known}")
        for field, most in _BITS.items():
            bits = getattr(self, field)
            if bits is not None and not (isinstance(bits, int) and 0 <= bits <= most):
                raise ConfigError(f"target {self.name!r}: {field}={bits}; expected None, or 0 to {most} bits")
        if self.lerp_bits is not None and self.lerp_bits < 7:
            raise ConfigError(f"target {self.name!r}: lerp_bits={self.lerp_bits}; expected None, or 7 to 15 bits")
        if self.slope is not None and not (isinstance(self.slope, Fraction) and 0 <= self.slope <= 1):
            raise ConfigError(f"target {self.name!r}: slope={self.slope!r}; expected None or a Fraction from 0 to 1")
        if self.relu6 is not None and not isinstance(self.relu6, int):
            raise ConfigError(f"target {self.name!r}: relu6={self.relu6!r}; expected None or an integer")
        if self.hard_sigmoid is not None and not (
            0 < self.hard_sigmoid[0] < 1 << 12 and 0 <= self.hard_sigmoid[1] < 32
        ):
            raise ConfigError(
                f"target {self.name!r}: hard_sigmoid={self.hard_sigmoid}; expected a multiplier of 12 bits and a shift"
            )


# onnxruntime on the QDQ model: exact, apart from the rounding of float32.
ORT = Target(name="ort", rounding="half_even", reciprocals=False, requantize="float32")

# The DPUs of Vitis AI up to 3.5.
DPU = Target(
    name="dpu",
    rounding="half_up",
    bias_guard=1,
    add_guard=2,
    slope=Fraction(SLOPE, 2**SLOPE_BITS),
    slope_shift=SLOPE_BITS,
    relu6=RELU6,
    hard_sigmoid=SIXTH,
    lerp_bits=15,
    bfloat16_softmax=True,
)

# The AI engines of Ryzen AI: the backend of Phoenix, and probably that of Strix.
AIE2_X1 = dataclasses.replace(DPU, name="aie2_x1", bias_guard=None, add_guard=7, slope=None, requantize="significand")
AIE2_EVEN = dataclasses.replace(AIE2_X1, name="aie2_even", rounding="half_even")

TARGETS: Mapping[str, Target] = MappingProxyType({t.name: t for t in (ORT, DPU, AIE2_X1, AIE2_EVEN)})


def target_of(target: str | Target) -> Target:
    """The target of that name.

    >>> target_of("dpu").add_guard
    2
    """
    if isinstance(target, Target):
        return target
    check_choice("target", target, TARGETS)
    return TARGETS[target]
