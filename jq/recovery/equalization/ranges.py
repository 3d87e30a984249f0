"""Cross-layer equalization as in its paper: a channel gets the same range in both layers of a pair.

Nagel et al., Data-Free Quantization through Weight Equalization and Bias Correction, arXiv:1906.04721. Channel i, with
the range r1_i in the layer that makes it and r2_i in the layer that reads it, is divided by

    s_i = sqrt(r1_i r2_i) / r2_i

where it is made and multiplied where it is read, after which both ranges are sqrt(r1_i r2_i). Pairs take
turns, as a layer may be in two of them, until no factor changes. Channels that reach a Clip keep their scale, where
the paper replaces ReLU6 by ReLU.
"""

from __future__ import annotations

import numpy as np

from jq.recovery.equalization.groups import FIXED, Groups

_TOLERANCE = 1e-6  # of a factor, relative, at which it counts as unchanged
_SWEEPS = 1000


def even_ranges(groups: Groups) -> np.ndarray:
    """Return the factors [classes], 1 / s, of channels that one layer makes and one layer reads; ones for the others."""
    sizes = [np.abs(layer.weight).max(2, initial=0) for layer in groups.layers]  # of kernels [O, J]
    pairs = list(zip(groups.layers, sizes, strict=True))
    made = [np.broadcast_to(groups.channels[layer.y][:, None], k.shape) for layer, k in pairs]
    read = [np.broadcast_to(groups.channels[layer.x][layer.reads], k.shape) for layer, k in pairs]
    numbers = np.arange(groups.count)
    makers, readers = (np.sum([np.isin(numbers, c) for c in side], axis=0) for side in (made, read))
    paired = (makers == 1) & (readers == 1) & (numbers != FIXED)
    own = [np.intersect1d(classes, numbers[paired]) for classes in made]
    after = [[j for j, classes in enumerate(read) if np.isin(classes, mine).any()] for mine in own]
    factors = np.ones(groups.count)

    def ranges(i: int, classes: np.ndarray) -> np.ndarray:
        """The largest magnitude in a layer of each class."""
        result = np.zeros(groups.count)
        np.maximum.at(result, classes, sizes[i] * factors[made[i]] / factors[read[i]])
        return result

    for _ in range(_SWEEPS):
        before = factors.copy()
        for i, classes in enumerate(own):
            r1 = ranges(i, made[i])[classes]
            r2 = np.max([ranges(j, read[j])[classes] for j in after[i]], axis=0, initial=0)
            live = (r1 > 0) & (r2 > 0)
            s = np.sqrt(r1 * r2) / np.where(live, r2, 1)
            factors[classes] /= np.where(live, s, 1)
        if np.allclose(factors, before, rtol=_TOLERANCE, atol=0):
            break
    return factors
