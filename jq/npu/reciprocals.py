"""Division on a chip that can only multiply and shift: 1/n as k / 2**shift, and how far that is off.

The multiplier has seven bits. What is returned as a factor is the quotient of what the chip computes and the
true mean, a number near one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_SQUARE = {3: (7, 6), 5: (10, 8), 6: (7, 8), 7: (21, 10), 14: (21, 12)}  # wired in, and partly not the nearest
LARGEST_SIDE = 255  # the side of the largest square for which the vendor's tool knows a multiplier


def reciprocal(count: int) -> tuple[int, int]:
    """The multiplier and the shift that come nearest to 1/count; of equal ones, those with the least shift.

    >>> reciprocal(6)
    (85, 9)
    """
    shifts = range(7 + (count - 1).bit_length())
    # |k / 2**s - 1/n| in integers: times n * 2**(the largest shift)
    shift = min(shifts, key=lambda s: abs(_nearest(s, count) * count - (1 << s)) << (shifts.stop - s))
    return _nearest(shift, count), shift


def _nearest(shift: int, count: int) -> int:
    return ((1 << shift + 1) + count - 1) // (2 * count)  # a half goes down: it is 1/2 only, and 1 is no better


def pool_multiplier(window: Sequence[int]) -> tuple[int, int]:
    """The multiplier and the shift that an average over a window has on the chip.

    >>> pool_multiplier((7, 7)), pool_multiplier((2, 3))
    ((21, 10), (85, 9))
    """
    square = len(window) == 2 and window[0] == window[1]
    return _SQUARE[window[0]] if square and window[0] in _SQUARE else reciprocal(math.prod(window))


def pool_factor(height: int, width: int) -> float:
    """What an average over a window becomes on the chip, relative to the true average.

    >>> pool_factor(3, 3), pool_factor(7, 7), pool_factor(8, 8)
    (0.984375, 1.0048828125, 1.0)
    """
    if height == width and height > LARGEST_SIDE:
        return 1.0
    multiplier, shift = pool_multiplier((height, width))
    return multiplier * height * width / 2**shift


def mean_factor(count: int) -> float:
    """What a mean of so many numbers becomes on the chip, relative to the true mean.

    The chip multiplies once for each axis; as in the vendor's tool, this is one multiplier for their product.
    """
    multiplier, shift = reciprocal(count)
    return multiplier * count / 2**shift
