"""By what the channels of an equalized network are scaled, read off two models and a few samples.

A tool that equalizes multiplies channel c of a tensor x by a factor g, so that y = g x + e in the quantized model. The
factors are fitted by least squares. One tensor alone tells them badly: behind a Relu, a channel that was made small has a
few codes at most, and a fit to these is off by more than they lost. But a factor passes through Relus, pools and sums, so
the tensors between two sets of weights have the same one (`find_groups` says which), and most of them are not rounded.
A fit over all of them, each weighted by one over the power of its e, is as good as the best of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from jq.recovery.equalization.groups import FIXED, Groups

_EQUALIZED = 0.5  # octaves that some channel is scaled by
_EXPLAINED = 0.5  # of the error, the most that may be left when that is undone
_OTHER = 0.1  # of a weight's power: rounding to 8 bits changes it by less
_ROUNDS = 4  # of fitting factors to the rows and the columns of a weight
_TINY = 1e-30  # of which one over it is a number of float32


@dataclasses.dataclass(frozen=True, eq=False)
class ChannelProducts:
    """Sums over the values of each channel of a tensor, x in the float model and y in the quantized one."""

    xx: np.ndarray
    xy: np.ndarray
    yy: np.ndarray
    unclipped_xx: np.ndarray  # where y is between the ends of its codes
    unclipped_xy: np.ndarray
    size: float  # values of all channels

    @property
    def is_usable(self) -> bool:
        """Whether factors could be told from it."""
        arrays = (self.xx, self.xy, self.yy, self.unclipped_xx, self.unclipped_xy)
        return all(np.isfinite(a).all() for a in arrays) and bool(self.unclipped_xy.sum() > 0)

    @property
    def noise(self) -> float:
        """The mean square of y that no factor of x explains."""
        explained = np.divide(self.xy**2, self.xx, out=np.zeros_like(self.xx), where=self.xx > 0)
        return max(float(np.sum(self.yy - explained)) / self.size, _TINY)

    def error(self, gains: np.ndarray) -> float:
        """The squared error with factors undone, relative to the tensor's power: one large factor does not decide."""
        return float(np.sum(self.yy / gains**2 - 2 * self.xy / gains + self.xx) / self.xx.sum())


def fitted_gains(sums: Mapping[str, ChannelProducts], groups: Groups, fixed: Iterable[str]) -> dict[str, np.ndarray]:
    """Return the factors of the channels of each tensor; ones, where they do not explain the error.

    `groups` are those of the float graph, and `fixed` names the tensors that no tool may scale. Channels of which the
    groups know nothing are fitted for their tensor alone.
    """
    gains = {name: np.ones(len(s.xx)) for name, s in sums.items()}
    usable = {name: s for name, s in sums.items() if s.is_usable and name not in set(fixed)}
    classes = _classes(usable, groups)
    for names in _joined(classes):
        count = 1 + max(int(classes[name].max()) for name in names)
        power, product = np.zeros((2, count))
        for name in names:
            own = usable[name]
            np.add.at(power, classes[name], own.unclipped_xx / own.noise)
            np.add.at(product, classes[name], own.unclipped_xy / own.noise)
        mean = product.sum() / power.sum()
        # A channel that hardly shows above the noise gets the mean of all.
        factors = np.where(product > 0, (product + mean) / (power + 1), mean)
        scaled = {name: factors[classes[name]] for name in names}
        plain = sum(usable[name].error(gains[name]) for name in names)
        left = sum(usable[name].error(own) for name, own in scaled.items())
        if max(np.abs(np.log2(g)).max() for g in scaled.values()) > _EQUALIZED and left < _EXPLAINED * plain:
            gains |= scaled
    return gains


def _classes(sums: Mapping[str, ChannelProducts], groups: Groups) -> dict[str, np.ndarray]:
    """The class of each channel, with classes of their own for channels that the groups fix or do not know."""
    classes, count = {}, groups.count
    for name, own in sums.items():
        known = groups.channels.get(name)
        known = np.full(len(own.xx), FIXED) if known is None or len(known) != len(own.xx) else known
        classes[name] = np.where(known == FIXED, count + np.arange(len(known)), known)
        count += len(known)
    return classes


def _joined(classes: Mapping[str, np.ndarray]) -> list[list[str]]:
    """The tensors, with those that share a class together."""
    first: dict[int, int] = {}  # class -> set
    sets: dict[int, list[str]] = {}
    for number, (name, own) in enumerate(classes.items()):
        others = {first[c] for c in own.tolist() if c in first}
        sets[number] = [*(n for other in sorted(others) for n in sets.pop(other)), name]
        first |= {c: number for n in sets[number] for c in classes[n].tolist()}
    return list(sets.values())


def outer_factors(x: np.ndarray, back: np.ndarray) -> np.ndarray:
    """Return the product of the factors of a weight's rows and columns that best explain what was made of it."""
    factors = np.ones((1,) * x.ndim)
    for axis in (0, 1) * _ROUNDS:
        rest = tuple(i for i in range(x.ndim) if i != axis)
        fitted = x * factors
        power, product = (np.sum(v, rest, keepdims=True) for v in (fitted**2, fitted * back))
        factors = factors * np.divide(product, power, out=np.ones_like(power), where=(power > 0) & (product > 0))
    return factors


def is_equalized(weights: Iterable[tuple[np.ndarray, np.ndarray]]) -> bool:
    """Return whether some weight is another one, apart from factors of its rows and columns."""
    for x, back in weights:
        plain = np.square(back - x).sum() if x.ndim > 1 else 0.0
        if plain > _OTHER * np.square(x, dtype=np.float64).sum():
            factors = outer_factors(x, back)
            if np.square(back / factors - x).sum() < _EXPLAINED * plain:
                return True
    return False
