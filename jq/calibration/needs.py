"""The tensors and the observers that a config needs."""

from __future__ import annotations

from jq.arithmetic.exponents import MINMSE
from jq.calibration.observers import (
    ErrorTable,
    HistogramObserver,
    Means,
    Moments,
    MovingRange,
    Observer,
    Range,
)
from jq.config import QuantConfig
from jq.graph import Graph, Node
from jq.ops.linear import has_product
from jq.ops.table import lookup

_ROOM = 1  # octaves that values may grow beyond the first batch before the error table is made anew
_ROOM_ONCE = 11  # the same where data cannot be read again


def observed(graph: Graph, config: QuantConfig) -> list[str]:
    """The tensors whose statistics `config` needs.

    With power-of-two scales that leaves out what a Relu or Clip alone reads, as its range is the output's as it was
    observed; with float scales it is all of them, as in onnxruntime's calibrators.
    """
    names = dict.fromkeys(v.name for v in graph.inputs)
    names |= dict.fromkeys(name for node in graph.nodes for name in node.outputs if name)
    cutting = [node for node in graph.nodes if cuts_alone(graph, node)]
    unseen = {node.inputs[0] for node in cutting} - {node.outputs[0] for node in cutting}
    return [n for n in names if n not in unseen or config.scale == "float"]


def cuts_alone(graph: Graph, node: Node) -> bool:
    """Whether a node alone reads its input and cuts it to an interval."""
    entry = lookup(node, graph.opset(node.domain))
    return entry is not None and entry.cuts and len(graph.consumers[node.inputs[0]]) == 1


def linear_inputs(graph: Graph) -> tuple[str, ...]:
    """The inputs of linear layers with a bias, whose channels' means tell by how much rounding the weight shifts it."""
    biased = [n for n in graph.nodes if len(n.inputs) > 2 and has_product(graph, n)]
    return tuple(dict.fromkeys(n.inputs[0] for n in biased))


def observers_of(config: QuantConfig, linear: tuple[str, ...] = (), *, again: bool = True) -> dict[str, Observer]:
    """The observers that a method needs; `again` says whether the data can be read twice."""
    observers: dict[str, Observer] = {}
    if config.corrects_bias and linear:
        observers["means"] = Means(only=linear)
    if config.moving_average is not None:
        observers["moving_range"] = MovingRange(weight=config.moving_average)
    if config.method == "minmse":
        room = _ROOM if again else _ROOM_ONCE
        count = len(MINMSE) + room
        parts = count if config.error_parts else 1
        observers["errors"] = ErrorTable(grid=config.activation_grid, candidates=count, parts=parts)
        return observers
    observers |= {"range": Range(), "moments": Moments()}
    if config.method not in ("nonoverflow", "minmax"):
        quark = config.method == "minmse_hist"
        absolute = config.symmetric and config.method in ("percentile", "layerwise_percentile")
        observers["histogram"] = HistogramObserver(
            bins=config.bins,
            absolute=absolute,
            centred=not absolute and not quark,
            growth=3 if quark or config.histogram_range == "first" else 1,
            double=quark,
        )
    return observers
