"""The guard: no tensor that rounding ruins is shipped silently.

Once there is a plan, the loss of each tensor and of its parts is measured on a few samples (`rounding_losses`). A tensor
below the bound that the config states is repaired, by the smallest change first:

    finer weights   a weight gets a scale for each channel, where its format has that;
    no constraint   where a tensor was ruined by a move that a node's shifts asked for, that node runs in float:
                    what it makes is not rounded, so that nothing has to be aligned there;
    float           a tensor that its own rounding ruins is not rounded, nor are those that hold the same values;
    biases          where rounding shifts the means of layers' outputs, biases are fitted layer by layer, if that is better.

Each round plans anew, because a repair in one place changes what constraints require in others. The result is a config,
plain data, which gives the same plan without the guard.
"""

from __future__ import annotations

import dataclasses
import glob
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jq.arithmetic.formats import Integer
from jq.calibration.stats import Stats
from jq.config import QuantConfig
from jq.data.sources import judged_samples
from jq.errors import ModelError
from jq.graph import Graph
from jq.npu.constraints import Move
from jq.plan import Plan
from jq.plan.placement import shared
from jq.plan.planning import plan_and_moves
from jq.plan.scales import channel_axes
from jq.recovery.rounding_losses import Loss, Watched
from jq.util.progress import log

_SAID = 10  # mends that the warning names, the worst ones
_BIT = 6.02  # dB
_LESS = 8.0  # dB below the bound, for operands of a Concat, and for weights, where floats cost most
_SHIFT = 16.0  # dB above the bound, for the means of a layer's channels: shifts add up, where rounding averages out
_FINER = 7.0  # dB above the bound, for weights that can have a scale for each channel, which costs nothing
_WIDE = 10.0  # dB more for these where activations have more than 8 bits: what weights lose is all that is lost


@dataclasses.dataclass(frozen=True)
class Mend:
    """A tensor that the guard found ruined, and what was done."""

    tensor: str
    part: str  # that loses most; "" for the whole
    node: str  # that makes it, or reads the weight
    cause: str  # rounding, or the constraint and its node
    before: float  # SQNR in dB
    after: float | None  # the same after the repair; None for a tensor that is no longer rounded
    action: str
    override: str  # the option of the config that does the same

    def __str__(self) -> str:
        """One line with the numbers, what was done, and the override that does the same."""
        part = f", {self.part}" if self.part else ""
        after = "" if self.after is None else f": {self.after:.1f} dB"
        return f"{self.tensor!r}{part}: {self.before:.1f} dB after {self.cause}; {self.action}{after} ({self.override})"


@dataclasses.dataclass(frozen=True, eq=False)
class Guarded:
    """A config with what the guard changed, the plan that it gives, and why.

    `shift` is a proposal: biases are fitted only if the outputs gain by it, which the pipeline measures.
    """

    config: QuantConfig
    plan: Plan
    moves: tuple[Move, ...]
    mends: tuple[Mend, ...] = ()
    shift: Mend | None = None
    losses: Mapping[str, float] = dataclasses.field(default_factory=dict)  # the SQNR in dB of a tensor's worst part


def guarded(graph: Graph, stats: Stats | None, config: QuantConfig, data: Any) -> Guarded:
    """Return the plan of a prepared graph with every tensor that rounding would ruin mended."""
    plan, moves = plan_and_moves(graph, stats, config)
    integers = any(isinstance(q.grid, Integer) and not q.dynamic for q in plan.activations.values())
    if config.guard is None or config.strict_quark or stats is None or not integers:
        return Guarded(config, plan, moves)
    watched = _watched(graph, config, data, plan)
    if watched is None:
        return Guarded(config, plan, moves)
    state, mends = Guarded(config, plan, moves), dict[str, Mend]()
    losses = list(watched.losses(plan))
    while new := _mended(graph, stats, state, watched, losses, config.guard):
        mends |= {m.tensor: m for m, _ in new}
        changed = state.config
        for _, change in new:
            changed = _merged(changed, change)
        state = Guarded(changed, *plan_and_moves(graph, stats, changed))
        watched = watched.covering(state.plan)
        losses = list(watched.losses(state.plan))
    left = {loss.tensor: loss for loss in losses}
    settled = [dataclasses.replace(m, after=left[m.tensor].sqnr if m.tensor in left else None) for m in mends.values()]
    kept = {name: loss.sqnr for name, loss in left.items()}
    return dataclasses.replace(state, mends=tuple(settled), losses=kept, shift=_shift(watched, state))


def _shift(watched: Watched, state: Guarded) -> Mend | None:
    """The mend of shifted means, if a layer has them; it is for models that are not finetuned, which fits biases."""
    config = state.config
    if config.guard is None or not config.corrects_bias or config.bias_correction == "statistics":
        return None
    shifts = sorted(((sqnr, node) for node, sqnr in watched.shifts(state.plan)), key=lambda pair: pair[0])
    below = [node for sqnr, node in shifts if sqnr < config.guard + _SHIFT]
    if not below:
        return None
    sqnr, node = shifts[0]
    part = f"the means of its channels, and those of {len(below) - 1} other layers"
    cause, action = "rounding of the layer's inputs", "all biases fitted layer by layer"
    return Mend(node.outputs[0], part, node.label, cause, sqnr, None, action, "finetune='bias'")


def warn_of_mends(made: Guarded) -> None:
    """Warn of what the guard did, with the override that does the same and the way to leave all as it was."""
    if made.mends:
        first = f"guard: {len(made.mends)} tensors lost more than rounding may cost, and were repaired"
        worst = sorted(made.mends, key=lambda m: m.before)[:_SAID]
        rest = (
            [f"  and {len(made.mends) - _SAID} more, in the report and in result.guard"] if made.mends[_SAID:] else []
        )
        lines = [first, *(f"  {m}" for m in worst), *rest, "  guard=None (--guard off) repairs nothing"]
        warnings.warn("\n".join(lines), stacklevel=3)


def _watched(graph: Graph, config: QuantConfig, data: Any, plan: Plan) -> Watched | None:
    try:
        return Watched.of(graph, judged_samples(data, graph.inputs, config.seed), plan)
    except ModelError as error:
        warnings.warn(f"no tensor is guarded, because onnxruntime does not run the float model: {error}", stacklevel=4)
        return None


Change = Mapping[str, Any]  # of a config: tensors to leave in float, or overrides


def _mended(
    graph: Graph, stats: Stats, state: Guarded, watched: Watched, losses: Iterable[Loss], bound: float
) -> list[tuple[Mend, Change]]:
    """Mends of the tensors that are below the bound; those that their own rounding ruins come first."""
    ruined = [loss for loss in losses if loss.sqnr < _bound(loss, graph, state, bound)]
    if not ruined:
        return []
    log.info("guard: %d tensors below %g dB", len(ruined), bound)
    free = plan_and_moves(graph, stats, state.config.replace(constraints=()))[0]
    unconstrained = dataclasses.replace(state, plan=free)
    alone = {loss.tensor for loss in watched.losses(free) if loss.sqnr < _bound(loss, graph, unconstrained, bound)}
    by_rounding = [loss for loss in ruined if loss.tensor in alone]
    together = _same_values(graph, state.plan)
    mends: list[tuple[Mend, Change]] = []
    for loss in by_rounding or ruined:
        if loss.tensor in state.plan.weights:
            mends.append(_finer(graph, state, loss) or _left(graph, state.plan, loss, "rounding", together))
        elif by_rounding:
            mends.append(_left(graph, state.plan, loss, "rounding", together))
        else:
            mends.append(_unconstrained(graph, state, loss, together))
    return mends


def _bound(loss: Loss, graph: Graph, state: Guarded, bound: float) -> float:
    """The bound for a tensor: it is stated for 8 bits, and fewer cannot keep as much."""
    grid = state.plan[loss.tensor].grid
    assert isinstance(grid, Integer)
    bound -= _BIT * max(0, 8 - grid.bits)
    if loss.tensor in state.plan.weights:
        if not _finer(graph, state, loss):
            return bound - _LESS
        activation = state.config.activation
        wide = isinstance(activation, Integer) and activation.bits > 8
        return bound + _FINER + (_WIDE if wide else 0)
    return bound - _LESS if loss.part.startswith("operand") else bound


def _same_values(graph: Graph, plan: Plan) -> dict[str, tuple[str, ...]]:
    """The tensors that hold the values of one another, by each of them."""
    sources = shared(graph, plan.nodes, plan.activations)
    groups: dict[str, list[str]] = {}
    for name in plan.activations:
        groups.setdefault(sources.get(name, name), []).append(name)
    return {name: tuple(group) for group in groups.values() for name in group}


def _left(
    graph: Graph, plan: Plan, loss: Loss, cause: str, together: Mapping[str, Sequence[str]]
) -> tuple[Mend, Change]:
    made = graph.producer.get(loss.tensor)
    names = tuple(together.get(loss.tensor, (loss.tensor,)))
    node = made.label if made is not None else "an input"
    mend = Mend(loss.tensor, loss.part, node, cause, loss.sqnr, None, "left in float", _override(names))
    return mend, {"float_tensors": names}


def _unconstrained(
    graph: Graph, state: Guarded, loss: Loss, together: Mapping[str, Sequence[str]]
) -> tuple[Mend, Change]:
    """The mend of what a constraint ruined: its node runs in float or, where it does already, the tensor stays float."""
    group = together.get(loss.tensor, (loss.tensor,))
    move = next((m for m in state.moves if m.tensor in group), None)
    if move is None:
        return _left(graph, state.plan, loss, "rounding", together)
    node = next(n for n in graph.nodes if n.label == move.node)
    cause, output = f"{move.rule} of {move.node!r}", node.outputs[0]
    if output not in state.plan.activations:
        return _left(graph, state.plan, loss, cause, together)
    names = tuple(together[output])
    mend = Mend(
        loss.tensor, loss.part, node.label, cause, loss.sqnr, None, f"{output!r} left in float", _override(names)
    )
    return mend, {"float_tensors": names}


def _finer(graph: Graph, state: Guarded, loss: Loss) -> tuple[Mend, Change] | None:
    """A scale for each channel of a weight, where there can be float scales."""
    node = graph.consumers[loss.tensor][0]
    pattern = glob.escape(node.label)  # of fnmatch, which reads brackets in a name otherwise
    if state.config.scale != "float" or state.config.of(node).per_channel or loss.tensor not in channel_axes(graph):
        return None
    change = {"overrides": {pattern: {"per_channel": True}}}
    action, override = "a scale for each channel", f"overrides={change['overrides']}"
    return Mend(loss.tensor, "", node.label, "rounding", loss.sqnr, None, action, override), change


def _override(names: Sequence[str]) -> str:
    return f"float_tensors={list(names)}"


def _merged(config: QuantConfig, change: Change) -> QuantConfig:
    tensors = dict.fromkeys((*config.float_tensors, *change.get("float_tensors", ())))
    overrides = {name: dict(options) for name, options in config.overrides}
    for name, options in change.get("overrides", {}).items():
        overrides[name] = overrides.get(name, {}) | options
    return config.replace(float_tensors=tuple(tensors), overrides=overrides)
