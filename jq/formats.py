"""Number formats that a tensor is quantized to."""

from __future__ import annotations

import dataclasses

import numpy as np

from jq.errors import ConfigError, suggest


@dataclasses.dataclass(frozen=True)
class Integer:
    """Integers of some bits.

    >>> INT8, INT8.narrow.qmin, UINT8.middle
    (int8, -127, 128)
    """

    bits: int
    signed: bool
    qmin: int
    qmax: int

    def __repr__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """As ONNX and numpy call the type that stores it."""
        return f"{'' if self.signed else 'u'}int{self.bits}"

    @property
    def dtype(self) -> np.dtype:
        """The numpy type that stores it."""
        return np.dtype(self.name)

    @property
    def narrow(self) -> Integer:
        """The codes left when the lowest of a signed format is not used, so that the grid is symmetric.

        An unsigned format keeps all: its symmetric form has its zero point in the middle.
        """
        return dataclasses.replace(self, qmin=-self.qmax) if self.signed else self

    @property
    def middle(self) -> int:
        """The zero point of a symmetric grid."""
        return (self.qmin + self.qmax + 1) // 2


INT8 = Integer(8, True, -128, 127)
UINT8 = Integer(8, False, 0, 255)
INT16 = Integer(16, True, -32768, 32767)
UINT16 = Integer(16, False, 0, 65535)
INT32 = Integer(32, True, -(2**31), 2**31 - 1)
_BY_NAME = {f.name: f for f in (INT8, UINT8, INT16, UINT16, INT32)}


def integer(name: str) -> Integer:
    """The format of that name.

    >>> integer("uint8").qmax
    255
    """
    if name not in _BY_NAME:
        raise ConfigError(f"no format {name!r}; there are {', '.join(_BY_NAME)}.{suggest(str(name), _BY_NAME)}")
    return _BY_NAME[name]
