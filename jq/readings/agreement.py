"""How far the outputs of two readings of one model agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How one output of a reading compares with another reading's."""

    output: str
    equal: float  # part of the elements
    largest: float | None  # difference; None if one of them is no number
    top1: float | None  # part of the samples with the same class, where the output has classes


@dataclasses.dataclass(frozen=True)
class Compared:
    """One output on one batch, in counts, which add up."""

    elements: int
    equal: int
    largest: float
    samples: int  # with classes
    same_class: int

    @classmethod
    def of(cls, mine: np.ndarray, theirs: np.ndarray) -> Compared:
        """The counts of two arrays.

        >>> Compared.of(np.float32([[1, 2]]), np.float32([[1, 2.5]]))
        Compared(elements=2, equal=1, largest=0.5, samples=1, same_class=1)
        """
        if mine.shape != theirs.shape:  # decided by values that differ
            return cls(max(mine.size, theirs.size), 0, np.inf, 0, 0)
        with np.errstate(all="ignore"):
            difference = np.abs(mine.astype(np.float64) - theirs.astype(np.float64))
        equal = (mine == theirs) | ((mine != mine) & (theirs != theirs))
        largest = float(np.nan_to_num(np.where(equal, 0, difference), nan=np.inf).max(initial=0))
        classes = mine.ndim == 2 and mine.shape[1] > 1
        same = mine.argmax(-1) == theirs.argmax(-1) if classes else np.zeros(0, bool)
        return cls(mine.size, int(equal.sum()), largest, same.size, int(same.sum()))


def agreement(output: str, parts: Sequence[Compared]) -> Agreement:
    """Return the agreement over all batches."""
    samples, elements = sum(p.samples for p in parts), max(1, sum(p.elements for p in parts))
    top1 = sum(p.same_class for p in parts) / samples if samples else None
    largest = max(p.largest for p in parts)
    return Agreement(output, sum(p.equal for p in parts) / elements, largest if np.isfinite(largest) else None, top1)


def agreements(
    mine: Iterable[Mapping[str, np.ndarray]], theirs: Iterable[Mapping[str, np.ndarray]]
) -> tuple[Agreement, ...]:
    """Return the agreement of each output over samples, as two readings give them.

    >>> agreements([{"y": np.zeros((1, 3))}], [{"y": np.zeros((1, 3))}])[0].equal
    1.0
    """
    parts: dict[str, list[Compared]] = {}
    for one, other in zip(mine, theirs, strict=True):
        for name in one:
            parts.setdefault(name, []).append(Compared.of(np.asarray(one[name]), np.asarray(other[name])))
    return tuple(agreement(name, compared) for name, compared in parts.items())
