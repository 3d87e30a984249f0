"""Cross-layer equalization: channels get factors that make rounding cost less, and the function stays.

Nagel et al., Data-Free Quantization through Weight Equalization and Bias Correction, arXiv:1906.04721, equalize the
ranges of weights in pairs of layers. Here the factors of all channels are found at once, such that the noise which
rounding of weights, biases and activations makes in the network's outputs is least, as predicted from the channels'
statistics: `groups` says where factors may go, `channels` what the channels hold, `noise` what rounding costs,
`factors` and `choice` which ones are good, and `rewrite` multiplies. `quark` is AMD Quark's own algorithm.

A ReLU6 need not become a ReLU for that: a channel with the factor s is cut at 6 / s, which changes nothing for
channels that stay below, and only those that reach the bound must keep their scale.
"""

from __future__ import annotations

from typing import Any

from jq.config import QuantConfig, resolve
from jq.graph import Graph
from jq.recovery.equalization.channels import Channels, measure
from jq.recovery.equalization.choice import choose
from jq.recovery.equalization.factors import optimize
from jq.recovery.equalization.groups import find_groups
from jq.recovery.equalization.noise import Noise, predict
from jq.recovery.equalization.quark import equalize_as_quark
from jq.recovery.equalization.rewrite import scaled


def equalize(graph: Graph, config: QuantConfig | str = "XINT8", data: Any = None) -> Graph:
    """Return a prepared graph whose channels have factors with which `config` rounds it with less noise.

    `data` is what `jq.calibrate` takes, and is read once; without it all channels are taken to be alike, and no Clip is
    passed. The function stays, to rounding of floats, but for what Clips cut: channels reach their bound elsewhere,
    on the data by no more than pays. Never worse by the predicted noise; the graph itself if nothing is better. With
    `strict_quark`, Quark's equalization.

    >>> import jq
    >>> graph = jq.prepare(jq.load(jq.zoo.path("fashion_mobilenet")), "XINT8")
    >>> images, _ = jq.zoo.calibration_set()
    >>> equalize(graph, "XINT8", images[:32]) is graph
    False
    """
    config = resolve(config)
    if config.strict_quark:
        return equalize_as_quark(graph)
    noise = predicted_noise(graph, config, data)
    return graph if noise is None else scaled(graph, noise.groups, choose(noise, optimize(noise)))


def predicted_noise(graph: Graph, config: QuantConfig, data: Any) -> Noise | None:
    """Return what rounding is predicted to cost at the outputs, by the factors; None where there is nothing to choose."""
    groups = find_groups(graph, clips=data is not None)
    if groups.count == 1 or not groups.layers:
        return None
    if data is None:
        seen = {name: Channels.unknown(len(classes)) for name, classes in groups.channels.items()}
    else:
        seen = measure(graph, groups, data, config)
    if not all(c.is_finite for c in seen.values()):
        return None  # calibration says where
    noise = predict(graph, groups, seen, config)
    return noise if noise.terms else None
