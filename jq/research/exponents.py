"""Exponents that change the network's outputs least, instead of those of least squared error tensor by tensor.

The weights of the float network stay as they are, and the constraints of the NPU hold at every step: tensors that must
have one position move together, and a move that would break a rule is not tried. Part of the data is held back, and a
move that it does not confirm is not kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import numpy as np

from jq.config import QuantConfig, resolve
from jq.errors import ConfigError, ModelError, check_choice
from jq.graph import Graph
from jq.plan import Plan
from jq.readings.data_shapes import traceable
from jq.research.descent import Moves, Step, Way, descend
from jq.research.executors import Executor
from jq.research.searching import SearchedNetwork, elsewhere
from jq.research.segments import Loss, PlanLosses, SampleBlock, blocks_of
from jq.research.sequential import in_turn
from jq.research.weighted import at_least_cost
from jq.util import markup

Method = Literal["joint", "coordinate", "beam", "weighted", "sequential"]

_JOINT: tuple[Method, ...] = ("weighted", "sequential", "coordinate")
_APART = 4  # every fourth sample is held back
_WAYS = 16  # of a method, that are looked at there


@dataclasses.dataclass(frozen=True, eq=False)
class Search:
    """The result of a search; losses are means over the samples held back. As text, a line for each move."""

    plan: Plan
    before: float
    after: float
    steps: tuple[Step, ...]  # that lead to the plan

    def __repr__(self) -> str:
        return f"Search({len(self.steps)} moves, loss {self.before:.4g} -> {self.after:.4g})"

    def __str__(self) -> str:
        return "\n".join([repr(self), *map(str, self.steps)])

    def _repr_html_(self) -> str:
        rows = [(", ".join(s.tensors), s.before, s.after, f"{s.gain:.2e}", f"{s.error:.1e}") for s in self.steps]
        return markup.preview(repr(self), ("tensors", "exponent", "after", "gain", "+-"), rows)


def search_exponents(
    graph: Graph,
    plan: Plan,
    data: Any,
    config: QuantConfig | str = "XINT8",
    *,
    method: Method = "joint",
    loss: Loss = "mse",
    params: Mapping[str, Any] | None = None,
    weights: bool = True,
    width: int = 4,
    sweeps: int = 1,
    executor: Executor | None = None,
) -> Search:
    """Return a plan with other powers of two, with which the graph's outputs are nearer to what it computes in floats.

    The methods: `coordinate` tries each exponent's neighbours in the order of the network, and keeps what makes the
    outputs' loss less; `beam` continues with the best `width` plans at once; `weighted` is least squared error, with the
    squares of the outputs' gradients as weights, from one pass over the data; `sequential` calibrates each tensor on
    what the quantized network before it gives. These two leave the scales of weights. `joint` is weighted, where the
    outputs have gradients, sequential and coordinate, each from the best plan of those before it.

    The loss is the squared error of the outputs, relative to their power (mse), or the divergence of the distributions
    that are the softmax over their classes (kl). No labels are needed. `params` are the weights that are rounded, by
    default the graph's own, which are the float network's in any case: see `jq.correct_biases`. Every fourth sample is
    held back, and the plan returned is the one, of those on the way, the given one among them, that has the least loss
    on these. An `executor` computes the losses of coordinate, of beam and of the samples held back elsewhere, with the same
    numbers.

    >>> import jq
    >>> graph = jq.prepare(jq.load(jq.zoo.path("fashion_mobilenet")), "XINT8")
    >>> images, _ = jq.zoo.calibration_set()
    >>> graph = jq.equalize(graph, "XINT8", images[:64])
    >>> plan = jq.make_plan(graph, jq.calibrate(graph, images[:64]))
    >>> search = search_exponents(graph, plan, images[:64], method="weighted")
    >>> search.after <= search.before
    True
    """
    config, graph = resolve(config), traceable(graph)
    check_choice("method", method, get_args(Method))
    check_choice("loss", loss, get_args(Loss))
    if width < 1 or sweeps < 1:
        raise ConfigError(f"width={width}, sweeps={sweeps}: expected 1 or more of both")
    moves = Moves.of(graph, plan, config, weights=weights)
    if not moves.groups:
        raise ConfigError("no tensor has an exponent that could change: a search needs scales that are powers of two")
    kept, apart = blocks_of(graph, data, config, apart=_APART)
    network = SearchedNetwork(graph, params or {}, plan, loss, {k: v[0] for k, v in kept[0].inputs.items()})
    local = network.segments()
    place: contextlib.AbstractContextManager[PlanLosses] = contextlib.nullcontext(local)
    with place if executor is None else elsewhere(network, local, executor) as segments:
        search = _Searching(network, segments, kept, apart, moves, config)
        return search.run(_JOINT if method == "joint" else (method,), method == "joint", width, sweeps)


@dataclasses.dataclass(frozen=True, eq=False)
class _Searching:
    """A search of a network's exponents, and the data of its two parts."""

    network: SearchedNetwork
    segments: PlanLosses
    kept: Sequence[SampleBlock]
    apart: Sequence[SampleBlock]
    moves: Moves
    config: QuantConfig

    def run(self, methods: Sequence[Method], joint: bool, width: int, sweeps: int) -> Search:
        """The best plan by these methods, each from the best before it."""
        begin = self.segments.begin(self.apart)

        def lost(way: Way) -> float:
            losses = self.segments.losses(0, [way.plan], [0], begin, self.apart)
            return float(np.concatenate(list(losses), 1).mean())

        best = Way(self.network.plan)
        before = least = lost(best)
        for method in methods:
            try:
                tried = _some(list(self._ways(method, best, width, sweeps)))
            except ModelError:
                if not joint or method != "weighted":
                    raise
                continue  # without gradients the others are left
            for way in tried:
                if (loss_there := lost(way)) < least:
                    best, least = way, loss_there
        return Search(best.plan, before, least, best.steps)

    def _ways(self, method: Method, way: Way, width: int, sweeps: int) -> Iterator[Way]:
        graph, params = self.network.graph, self.network.params
        match method:
            case "weighted":
                key = jax.random.key(self.config.seed)
                return at_least_cost(graph, self.kept, way, self.moves, self.network.loss, key)
            case "sequential":
                return in_turn(graph, self.kept, way, self.moves, params)
            case _:
                return descend(self.segments, self.kept, way, self.moves, width if method == "beam" else 1, sweeps)


def _some(ways: Sequence[Way]) -> Sequence[Way]:
    """Some of the plans on a method's way, the last among them."""
    return [ways[i] for i in sorted({round(i) for i in np.linspace(len(ways) - 1, 0, _WAYS)})] if ways else ways
