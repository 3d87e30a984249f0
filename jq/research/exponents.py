"""Exponents that change the network's outputs least, instead of those of least squared error tensor by tensor.

The weights of the float network stay as they are, and the constraints of the NPU hold at every step: tensors that must
have one position move together, and a move that would break a rule is not tried. Part of the data is held back, and a
move that it does not confirm is not kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, get_args

from jq.config import QuantConfig, resolve
from jq.errors import ConfigError, check_choice
from jq.graph import Graph
from jq.plan import Plan
from jq.readings.data_shapes import traceable
from jq.recovery.exponents.descent import Moves
from jq.recovery.exponents.search import Method, Search, SearchedNetwork, Searching
from jq.recovery.exponents.segments import Loss, PlanLosses, blocks_of
from jq.research.executors import Executor
from jq.research.searching import elsewhere


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
        raise ConfigError(f"width={width}, sweeps={sweeps}: expected both to be 1 or more")
    moves = Moves.of(graph, plan, config, weights=weights)
    if not moves.groups:
        raise ConfigError("no tensor has an exponent that could change: a search needs scales that are powers of two")
    kept, apart = blocks_of(graph, data, config)
    network = SearchedNetwork(graph, params or {}, plan, loss, {k: v[0] for k, v in kept[0].inputs.items()})
    local = network.segments()
    place: contextlib.AbstractContextManager[PlanLosses] = contextlib.nullcontext(local)
    with place if executor is None else elsewhere(network, local, executor) as segments:
        return Searching(network, segments, kept, apart, moves, config).run(method, width, sweeps)
