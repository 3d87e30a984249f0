"""Canonical forms: what exporters decompose becomes one operator again, before anything is quantized.

Rounding inside a normalization or an activation destroys networks; inside one operator there is none. All of it is exact
in float, whatever the spelling: see `regions`. A form is an entry in the table of its family.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping
from types import MappingProxyType

from jq.graph import Graph, Node
from jq.npu.rewrites.edits import Applies, everywhere
from jq.passes.canonical.activations import ACTIVATIONS
from jq.passes.canonical.factors import fold_factors
from jq.passes.canonical.forms import CanonicalForm, Match, put, recognised
from jq.passes.canonical.groups import group_norms
from jq.passes.canonical.normalization import NORMALIZATIONS
from jq.passes.canonical.softmax import SOFTMAX

FORMS: Mapping[str, CanonicalForm] = MappingProxyType({**NORMALIZATIONS, **SOFTMAX, **ACTIVATIONS})


@dataclasses.dataclass(frozen=True, eq=False)
class Canonical:
    """A graph in canonical form, and what was recognised in it."""

    graph: Graph
    matches: tuple[Match, ...]
    folded: tuple[Node, ...]  # scales and shifts, into linear layers

    def __str__(self) -> str:
        counts = Counter(m.form for m in self.matches) | Counter({"factors": len(self.folded)})
        return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "none"


def put_together(graph: Graph, names: Collection[str], applies: Applies = everywhere) -> Canonical:
    """The graph with the named forms in place of regions that compute them, made of nodes that `applies` accepts."""
    forms = {name: form for name, form in FORMS.items() if name in names}
    graph, matches = put(graph, lambda graph: recognised(graph, forms, applies))
    if "group_norm" in names:
        graph, groups = put(graph, lambda graph: group_norms(graph, applies))
        types = [m.region.graph.values[m.region.end.outputs[0]] for m in groups]  # which onnx does not infer
        graph = graph.replace(declared={**graph.declared, **{v.name: v for v in types}}) if groups else graph
        matches += groups
    folded: tuple[Node, ...] = ()
    if "factors" in names:
        graph, folded = fold_factors(graph, applies)
    return Canonical(graph, matches, folded)
