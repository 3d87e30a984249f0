"""Rewrites of the graph before it is quantized: each pass is one file and one function.

A pass is pure: it returns a new graph, or the very graph it was given when it finds nothing to do, so
that `simplify` can stop. The graph's inputs and outputs keep their names, and so do the
nodes that remain.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from jq.graph import Graph
from jq.graph.unused import remove_unused
from jq.passes.affine import fold_batchnorm, fuse_affine
from jq.passes.branches import inline_branches
from jq.passes.constants import fold_constants
from jq.passes.duplicates import merge_duplicates
from jq.passes.identity import remove_identities
from jq.passes.pads import fuse_pads
from jq.passes.shapes import fold_shapes
from jq.passes.slices import merge_slices

Pass = Callable[[Graph], Graph]

# Cheap passes that shrink the graph go first; folding into weights needs weights that are arrays.
CLEANING: tuple[Pass, ...] = (
    remove_unused,
    fold_shapes,
    fold_constants,
    inline_branches,
    remove_identities,
    merge_duplicates,
    fold_batchnorm,
    fuse_affine,
    fuse_pads,
    merge_slices,
)
# The vendor's tool (onnxruntime and onnxslim) fuses less, and every remaining tensor gets a quantizer.
QUARKS = tuple(functools.partial(fuse_affine, operators=("Add", "Mul")) if p is fuse_affine else p for p in CLEANING)
_ROUNDS = 20  # two or three are usual; the bound stops passes that undo each other


def simplify(graph: Graph, passes: Sequence[Pass] = CLEANING) -> Graph:
    """Return an equivalent graph with less in it: `passes` run until nothing changes.

    >>> import jq
    >>> graph = jq.load(jq.zoo.path("fashion_resnet"))
    >>> len(graph.nodes), len(simplify(graph).nodes)
    (53, 38)
    """
    for _ in range(_ROUNDS):
        before = graph
        for apply in passes:
            graph = apply(graph)
        if graph is before:
            break
    return graph
