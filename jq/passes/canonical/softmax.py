"""Softmax as exponentials over their sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from jq.graph import Node
from jq.passes.canonical.forms import CanonicalForm, Names, Written
from jq.passes.canonical.normalization import probed, reduced_axes
from jq.passes.canonical.regions import Region, is_close


def _softmax(region: Region) -> Callable[[Names], Written] | None:
    if "Exp" not in region.operators or len(axes := reduced_axes(region)) != 1 or not (dims := probed(region)):
        return None
    x = 5 * np.cos(np.arange(np.prod(dims)).reshape(dims) * 1.7)
    powers = np.exp(x - x.max(axes, keepdims=True))
    if not is_close(region(x), powers / powers.sum(axes, keepdims=True)):
        return None
    node = Node("Softmax", (region.source,), region.end.outputs, {"axis": axes[0]}, region.end.name)
    return lambda name: ([node], {})


SOFTMAX: Mapping[str, CanonicalForm] = MappingProxyType({"softmax": CanonicalForm(13, _softmax)})
