"""Arrays as users have them (channels last, bytes, float64) become what a model's input takes, and it is told."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jq.data.preprocessing import UNIT, Preprocessing
from jq.errors import DataError
from jq.graph import Dim, Value

_ADVICE = (
    "; if the model was trained with other values, give --prep (imagenet, keras-caffe, tf, raw) or --mean and --std"
)


@dataclasses.dataclass(frozen=True)
class Fitting:
    """A change to the arrays of one input."""

    dtype: np.dtype  # that the input takes
    last: bool  # whether the input has its channels last
    moved: bool  # whether the arrays have them elsewhere
    pixels: Preprocessing | None  # of arrays of bytes

    def in_order(self, array: np.ndarray) -> np.ndarray:
        """A view of the array with its channels where the input has them."""
        if not self.moved:
            return array
        return np.moveaxis(array, -3, -1) if self.last else np.moveaxis(array, -1, -3)

    def converted(self, array: np.ndarray) -> np.ndarray:
        """The array, whose channels are in order, in the input's type and scale."""
        if self.pixels is None:
            return np.ascontiguousarray(array, self.dtype)
        pixels = array if self.last else np.moveaxis(array, -3, -1)
        made = self.pixels.apply(pixels)
        return np.ascontiguousarray(made if self.last else np.moveaxis(made, -1, -3), self.dtype)


def fitting(value: Value, array: np.ndarray, pixels: Preprocessing | None, where: str) -> Fitting | None:
    """Return the change that makes arrays fit an input, and warn of it; None where nothing needs to be done, or nothing helps.

    >>> bytes_of = np.zeros((2, 8, 8, 3), np.uint8)
    >>> with warnings.catch_warnings(record=True):
    ...     made = fitting(Value("x", np.dtype("float32"), ("N", 3, 8, 8)), bytes_of, UNIT, "data")
    >>> made.converted(made.in_order(bytes_of)).shape
    (2, 3, 8, 8)
    """
    if value.dtype is None or not jnp.issubdtype(value.dtype, jnp.floating):
        return None
    moved, words = is_moved(value.shape, array.shape), list[str]()
    shape = value.shape or ()
    last = len(shape) == 4 and shape[1] not in (1, 3) and shape[3] in (1, 3)
    channels = array.shape[-3:][2 if last != moved else 0] if array.ndim >= 3 else 0
    if moved:
        words.append(
            "channels are moved behind height and width" if last else "channels are moved in front of height and width"
        )
    how = None
    if array.dtype == np.uint8 and len(shape) == 4 and channels in (1, 3):
        how = pixels or UNIT
        if any(np.size(v) not in (1, channels) for v in (how.mean, how.std)):
            raise DataError(f"{where}: mean and std do not fit the {channels} channels of input {value}")
        words.append(f"bytes are taken as pixels and fed as {how.values}{'' if pixels else _ADVICE}")
    elif array.dtype == np.float64 and value.dtype != np.float64:
        words.append(f"float64 is rounded to {value.dtype}")
    elif array.dtype != value.dtype:
        return None
    if not words:
        return None
    text = f"{where}: {array.dtype}[{','.join(map(str, array.shape))}] for input {value}: {', '.join(words)}"
    warnings.warn(text, UserWarning, stacklevel=2)
    return Fitting(value.dtype, last, moved, how)


def is_moved(declared: Sequence[Dim] | None, shape: Sequence[Dim]) -> bool:
    """Whether images [..., 3 axes] have their channels on the other side than an input declares.

    >>> is_moved(("N", 3, 224, 224), (5, 224, 224, 3)), is_moved(("N", 3, "H", "W"), (5, 3, 8, 3))
    (True, False)
    """
    if declared is None or len(declared) != 4 or len(shape) < 3:
        return False
    inner, have = tuple(declared[1:]), tuple(shape[-3:])
    first = inner[0] in (1, 3)
    others = (inner[1], inner[2], inner[0]) if first else (inner[2], inner[0], inner[1])
    known = first or inner[2] in (1, 3)

    def fits(dims: Sequence[Dim]) -> bool:
        return all(not isinstance(d, int) or d == n for d, n in zip(dims, have, strict=True))

    return known and not fits(inner) and fits(others)
