"""Rules of `lint` on constants: what a scale of few bits loses of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from jq.arithmetic import layout
from jq.arithmetic.formats import Integer
from jq.config import QuantConfig
from jq.evidence.lint_rules import Found, Rule, counted, float_params, listed, rule
from jq.graph import Graph, Node
from jq.ops.kinds import breaks_at_zero, combines, divides, guards, keeps_range
from jq.ops.linear import linear_layer
from jq.util.mapped import release

RULES: list[Rule] = []
_rule = functools.partial(rule, RULES)
_DEAD = 1e-6  # of a tensor's largest weight: such a channel holds nothing, whatever the format
_DECAYED = 1e-4  # such a channel is no measure of the others
_FEW_BITS = 3
_FEW_BITS_CODE = 2 ** (_FEW_BITS - 1) - 1  # the largest code of that many bits
_MANY = 0.1  # of the channels
_TINY, _HUGE = 1e-4, 1e4  # constants added to activations: an epsilon, a mask
_VANISHING = 0.5  # of a constant's elements


@_rule("channel-range")
def _channel_range(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    top = _largest_code(config)
    if config.per_channel or not top:
        return
    weak_weights: list[tuple[float, Node, str]] = []
    for node, name, ranges in _channel_ranges(graph):
        live = ranges[ranges > _DECAYED * ranges.max(initial=0)]
        if live.size < 2:
            continue
        codes = live / live.max() * top
        weak, gone = np.count_nonzero(codes < _FEW_BITS_CODE), np.count_nonzero(codes < 0.5)
        # What training has let decay is far below the rest and vanishes without harm (ResNet-50 has such); channels
        # that keep a bit or two are ones that matter (depthwise layers of MobileNets), or so is the median one.
        if weak - gone >= _MANY * live.size or np.median(codes) < _FEW_BITS_CODE:
            ratio, least = codes.max() / np.median(codes), codes.max() / codes.min()
            zero = f", {gone} of them all zero" if gone else ""
            text = f"{name}: {weak} of {live.size}{zero}; the largest is {ratio:.3g} times the median and {least:.3g} "
            weak_weights.append((weak / live.size, node, f"{text}times the smallest"))
    if weak_weights:
        weak_weights.sort(key=lambda f: -f[0])
        advice = (
            "equalize the layers (CLE), or finetune after quantizing"
            if config.scale == "power_of_two"
            else "set per_channel=True"
        )
        yield Found(
            weak_weights[0][1].label,
            f"output channels get fewer than {_FEW_BITS} bits from one scale per tensor, in {counted(len(weak_weights), 'weight')} "
            f"({listed((text for _, _, text in weak_weights), ' | ')}): {advice}",
        )


@_rule("dead-channel", "note")
def _dead_channel(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    with_dead: list[tuple[str, int, int]] = []
    for _, name, ranges in _channel_ranges(graph):
        dead = int(np.count_nonzero(ranges <= _DEAD * ranges.max(initial=0)))
        if dead:
            with_dead.append((name, dead, ranges.size))
    if with_dead:
        total = sum(dead for _, dead, _ in with_dead)
        with_dead.sort(key=lambda f: -f[1] / f[2])
        yield Found(
            with_dead[0][0],
            f"{counted(total, 'output channel')} whose weights are all zero (below {_DEAD:g} of the tensor's largest), in "
            f"{counted(len(with_dead), 'weight')} ({listed(f'{k}: {dead} of {size}' for k, dead, size in with_dead)}): "
            "they cost time but give a constant; prune them",
        )


@_rule("constant-range")
def _constant(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    by_message: dict[str, list[tuple[str, Node]]] = {}
    top, floats = _largest_code(config), dict(float_params(graph))
    for node in graph.nodes if top else ():
        for name in dict.fromkeys(node.inputs if combines(node) else ()):
            size = np.abs(floats.get(name, np.zeros(0))).astype(np.float64).reshape(-1)
            size = size[np.isfinite(size) & (size > 0)]
            if not size.size:
                continue
            largest, lost = size.max(), np.count_nonzero(size < size.max() / top / 2)
            text = f"{name} of {node.label}: {largest:.3g}"
            if largest >= _HUGE and keeps_range(node):
                by_message.setdefault(_TOO_LARGE, []).append((text, node))
            elif largest < _TINY and guards(node) and _is_guarded(graph, node):
                by_message.setdefault(_TOO_SMALL, []).append((text, node))
            elif lost >= _VANISHING * size.size:
                text = f"{name} of {node.label}: {lost} of {size.size}, the largest {largest:.3g}"
                by_message.setdefault(_TOO_WIDE, []).append((text, node))
    for message, operands in by_message.items():
        what = f"{counted(len(operands), 'constant operand')} {message} ({listed((t for t, _ in operands), ' | ')})"
        yield Found(operands[0][1].label, what)


_TOO_LARGE = (
    "so large that other values at the same scale round to zero; for a mask before a Softmax, use -100, otherwise leave the "
    "node in float"
)
_TOO_SMALL = (
    "so small that an 8-bit sum loses it, so the division, root or logarithm after it is not guarded: leave "
    "these nodes in float"
)
_TOO_WIDE = (
    "with at least half of the elements rounding to zero at the scale of the largest: use two constants, or leave the node "
    "in float"
)


def _largest_code(config: QuantConfig) -> float:
    """The largest code of a weight; 0 where weights have no scale per tensor or channel."""
    weight = config.weight
    return (weight.narrow.qmax - weight.narrow.qmin) / 2 if isinstance(weight, Integer) else 0.0


def _channel_ranges(graph: Graph) -> Iterator[tuple[Node, str, np.ndarray]]:
    """The largest magnitude in each output channel of each weight, weights that several nodes share once."""
    seen: set[str] = set()
    floats = dict(float_params(graph))
    for node in graph.nodes:
        layer = linear_layer(graph, node)
        if layer is None or layer.weight in seen or layer.weight not in floats:
            continue
        weight = floats[layer.weight]
        if weight.ndim < 2 or not weight.size:
            continue
        seen.add(layer.weight)
        by_output = layer.unfolded(weight)
        rows = layout.rows(weight, layer.axis) if by_output is None else by_output.weight
        axes = tuple(range(1, rows.ndim))
        ranges = np.maximum(rows.max(axes), -rows.min(axes))
        release(weight)
        if np.isfinite(ranges).all():  # else `non-finite` has said so
            yield node, layer.weight, ranges.astype(np.float64)


def _is_guarded(graph: Graph, node: Node) -> bool:
    """Whether an operator that zero would break reads the node's output: what was added is an epsilon."""
    return any(
        breaks_at_zero(n) or (divides(n) and n.inputs[1] in node.outputs)
        for n in graph.consumers.get(node.outputs[0], ())
    )
