"""The factors that are taken: of those tried in each group, the ones that leave the least noise with real steps.

A step that is a power of two may be up to twice as long as a range needs. A factor for a whole group changes no ratio
within it, but how its ranges lie to those powers.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jq.recovery.equalization.factors import limits
from jq.recovery.equalization.groups import FIXED
from jq.recovery.equalization.noise import Noise

_PARTS = 6  # of an octave, by which the factors of a group are shifted
_SWEEPS = 2
_AS_GOOD = 0.01  # more noise that powers of two may leave, which change no value of the float model by a bit


def choose(noise: Noise, optimum: np.ndarray) -> np.ndarray:
    """Return factors [classes] near an optimum, group by group, or ones where these leave no more noise.

    The noise counted is that at steps of powers of two, of which MinMSE takes one.
    """
    group, limit = noise.groups.group, np.log2(limits(noise))
    members = {int(g): np.nonzero(group == g)[0] for g in np.unique(group) if g != group[FIXED]}
    of_group = {g: [i for i, (_, groups) in enumerate(noise.terms) if g in groups] for g in members}
    now = optimum.copy()
    values = {i: term(now) for i, (term, _) in enumerate(noise.terms)}
    for _ in range(_SWEEPS):
        before = now
        for g, classes in members.items():
            least = sum(values[i] for i in of_group[g])
            for z, preferred in _candidates(np.log2(now[classes])):
                trial = now.copy()
                trial[classes] = np.exp2(np.minimum(z, np.floor(limit[classes]) if preferred else limit[classes]))
                tried = {i: noise.terms[i][0](trial) for i in of_group[g]}
                total = sum(tried.values())
                if total < least * (1 + preferred * _AS_GOOD):
                    now, least = trial, total
                    values |= tried
        if np.array_equal(now, before):
            break
    ones = np.ones_like(now)
    return now if noise.total(now) < noise.total(ones) else ones


def _candidates(z: np.ndarray) -> Iterator[tuple[np.ndarray, bool]]:
    """Logarithms to try in place of a group's, and whether they are whole numbers."""
    for part in range(-_PARTS // 2, _PARTS // 2 + 1):
        if part:
            yield z + part / _PARTS, False
    yield np.zeros_like(z), True
    yield np.rint(z), True
