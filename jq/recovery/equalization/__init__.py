"""Equalization: every channel gets a factor with which rounding costs less, and the network computes the same.

A factor s_c > 0 multiplies channel c where a layer makes it, and divides the weights that read it. Three choices:
minimum-noise equalization (`cle=True`, derived here); equal ranges by pairs of layers, Nagel et al.'s cross-layer
equalization (`cle="nagel"`, `ranges`); and AMD Quark's own (`strict_quark`, `quark`).

**Minimum-noise equalization** finds all factors at once, such that rounding adds the least noise to the outputs. A tensor t
that is rounded with the step D_t has the error D_t^2 / 12, and its largest value decides the step: with q codes on
either side of zero,

    activations  D_t(s) = max_c s_c R_tc / q             noise  D_t^2 / 12  sum_c  w_tc a_tc / s_c^2
    weights      D_l(s) = max_oj (s_o / s_j) |W_oj| / q  noise  D_l^2 / 12  sum_oj K w_lo (1 / s_o^2) p_lj s_j^2
    biases       the weights of one input that is 1, with a factor of 1

where R is the reach of a channel on the data, a the part of its values that is not zero, p the power of what a weight
multiplies (its variance where biases are corrected), K the size of a kernel, and w the importance of a channel: how much of
the outputs' power its noise becomes (`noise.importance`). Divided by s, noise is measured in the original's units. A
ReLU6 cuts a channel at b / s_c instead of b, so that with s_c < 1 it passes, of values above b with an exponential tail of
mean m_c and mean square v_c of the excess,

    C_t(s) = sum_c  w_tc v_tc (1 - (1 + u) exp(-u)),     u = b (1 / s_c - 1) / m_c.

The program is

    minimize over s > 0   sum_t noise_t(s) + C_t(s)      subject to   s_c <= b / R_tc  at each ReLU6.

Without C it is a geometric program: in log s each noise is a maximum times a sum of exponentials of linear functions, so
its logarithm is convex. `factors` solves it by Adam with maxima as p-norms that sharpen, then tries shifts
and powers of two for each group of channels with the steps that MinMSE takes, clipping counted, because steps that
are powers of two follow ranges in jumps; ones are kept where they predict no more noise. `groups` says where factors may
go and multiplies, `channels` measures R, a and p, and `noise` predicts. Meller et al., Same, Same But Different
(arXiv:1902.01917), maximize the SQNR of single layers in the same way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jq.config import QuantConfig, resolve
from jq.graph import Graph
from jq.readings.data_shapes import traceable
from jq.recovery.equalization.channels import Channels, measure
from jq.recovery.equalization.factors import choose, optimize
from jq.recovery.equalization.groups import find_groups, scaled
from jq.recovery.equalization.noise import Noise, predict
from jq.recovery.equalization.quark import equalize_as_quark
from jq.recovery.equalization.ranges import even_ranges


def equalize(graph: Graph, config: QuantConfig | str = "XINT8", data: Any = None, *, mesh: Mesh | None = None) -> Graph:
    """Return a prepared graph with equalized channels, which `config` rounds with less noise.

    `data` is what `jq.calibrate` takes, and is read once; without data all channels are assumed to be alike, and no Clip is
    crossed. The function does not change, up to the rounding of floats, except where Clips cut: rescaled channels reach
    their bound elsewhere. The predicted noise is never worse; if nothing is better, the graph itself is returned.
    `config.cle="nagel"` equalizes ranges as in the paper, without data; `strict_quark` as Quark does. The pass over the data
    uses one device, or those of `mesh`: on another number of them sums differ in their last bits, and factors with them.

    >>> import jq
    >>> graph = jq.prepare(jq.load(jq.zoo.path("fashion_mobilenet")), "XINT8")
    >>> images, _ = jq.zoo.calibration_set()
    >>> equalize(graph, "XINT8", images[:32]) is graph
    False
    """
    return equalized(graph, resolve(config), data, mesh).graph


@dataclasses.dataclass(frozen=True, eq=False)
class Equalized:
    """A graph with equalized channels, and the largest magnitudes of its tensors on the data, as far as they were seen.

    They are those of the network whose Clips cut where they did before, so that they differ from its own by some percent.
    """

    graph: Graph
    reaches: Mapping[str, float] = dataclasses.field(default_factory=dict)


def equalized(graph: Graph, config: QuantConfig, data: Any, mesh: Mesh | None = None) -> Equalized:
    """Return what `equalize` does, with what its pass over the data knows of the ranges of the equalized graph."""
    if config.strict_quark:
        return Equalized(equalize_as_quark(graph))
    if config.cle == "nagel":
        groups = find_groups(graph, clips=False)
        return Equalized(scaled(graph, groups, even_ranges(groups)))
    noise = predicted_noise(graph, config, data, mesh)
    if noise is None:
        return Equalized(graph)
    factors = choose(noise, optimize(noise))
    made = scaled(graph, noise.groups, factors)
    if data is None:
        return Equalized(made)
    return Equalized(made, noise.reaches(factors if made is not graph else np.ones_like(factors)))


def predicted_noise(graph: Graph, config: QuantConfig, data: Any, mesh: Mesh | None = None) -> Noise | None:
    """Return the noise that rounding adds to the outputs, as a function of factors; None where there is no choice."""
    graph = traceable(graph)
    groups = find_groups(graph, clips=data is not None)
    if groups.count == 1 or not groups.layers:
        return None
    if data is None:
        seen = {name: Channels.unknown(len(classes)) for name, classes in groups.channels.items()}
    else:
        seen = measure(graph, groups, data, config, mesh)
    if not all(c.is_finite for c in seen.values()):
        return None  # calibration says where
    noise = predict(graph, groups, seen, config)
    return noise if noise.terms else None
