"""What will not go well on the NPU or in 8 bits, told before quantizing.

A rule is one function of a graph and a config that yields findings; `@_rule` puts it in the table, in
the order of this file. Rules see the graph as `prepare` leaves it, so that what is folded away is no
finding, unless they ask for the graph as loaded. What repeats is one finding with a count.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar, get_args

import numpy as np
from onnx import ModelProto

from jq.arithmetic.formats import Integer
from jq.config import QuantConfig, resolve
from jq.evidence.lint_queries import (
    LINEAR,
    channel_ranges,
    float_params,
    gates_itself,
    is_guarded,
    limits,
    mean_window,
    overhangs,
    shape_arithmetic,
)
from jq.graph import Graph, Node
from jq.graph.quantizers import is_quantized
from jq.graph.read import load
from jq.graph.schemas import attributes
from jq.npu.facts import NPU_FORMATS, is_hard_sigmoid, is_too_large, leaky_slope, pool_multiplier, reciprocal
from jq.npu.rewrites.pools import split_kernel
from jq.passes.prepare import prepare
from jq.plan.placement import absorbed, rule_of
from jq.plan.planning import weights_to_quantize
from jq.plan.selection import selected
from jq.readings.tracing import unsupported

_Key = TypeVar("_Key", bound=Hashable)
Severity = Literal["error", "warning", "note"]
Check = Callable[[Graph, QuantConfig], Iterable["_Found"]]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing to know before quantizing.

    >>> print(Finding("few-convs", "warning", "graph", "one Conv"))
    warning: graph: one Conv [few-convs]
    """

    rule: str  # kebab-case id
    severity: Severity  # error: will fail or be wrong; warning: slow or inaccurate; note: good to know
    where: str  # the first node or tensor concerned
    message: str  # what was found, what was expected, what to do

    def __str__(self) -> str:
        return f"{self.severity}: {self.where}: {self.message} [{self.rule}]"


def lint(
    model: str | os.PathLike[str] | bytes | ModelProto | Graph, config: QuantConfig | str = "XINT8"
) -> list[Finding]:
    """Return what will not go well when the model is quantized so: errors first, then warnings, then notes.

    Nothing is run and no data are needed. What is said of the NPU is what its documents and reference
    code say, not what a device did.

    >>> import jq.zoo
    >>> [f.rule for f in lint(jq.zoo.path("fashion_resnet")) if f.severity != "note"]
    []
    """
    options = resolve(config)
    loaded = model if isinstance(model, Graph) else load(model)
    prepared = prepare(loaded)
    found = [
        Finding(rule.name, f.severity or rule.severity, f.where, f.message)
        for rule in RULES
        for f in rule.check(loaded if rule.loaded else prepared, options)
    ]
    return sorted(found, key=lambda f: get_args(Severity).index(f.severity))


@dataclasses.dataclass(frozen=True)
class Rule:
    """A check, the name and as a rule the severity of what it finds, and which graph it wants."""

    name: str
    severity: Severity
    check: Check
    loaded: bool  # the graph as loaded; else as `prepare` leaves it


class _Found(NamedTuple):
    """What a check yields."""

    where: str
    message: str
    severity: Severity | None = None  # if not the rule's


RULES: list[Rule] = []


def _rule(name: str, severity: Severity = "warning", *, loaded: bool = False) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        RULES.append(Rule(name, severity, check, loaded))
        return check

    return add


_SHOWN = 5  # names in one message

# Relative differences from which a change of the model is a warning, below which a note.
_LARGE = 0.01
_DEAD = 1e-6  # of a tensor's largest weight: such a channel holds nothing, whatever the format
_DECAYED = 1e-4  # such a channel is no measure of the others
_FEW_BITS = 3
_FEW_BITS_CODE = 2 ** (_FEW_BITS - 1) - 1  # the largest code of that many bits
_MANY = 0.1  # of the channels
_TINY, _HUGE = 1e-4, 1e4  # constants added to activations: an epsilon, a mask
_VANISHING = 0.5  # of a constant's elements


@_rule("already-quantized", "error", loaded=True)
def _already_quantized(graph: Graph, config: QuantConfig) -> Iterator[_Found]:
    found = [n for n in graph.walk() if is_quantized(n)]
    if found:
        yield _Found(
            found[0].label,
            f"{_count(len(found), 'node')} of a quantized model ({_list(_types(found))}); expected a float model: quantize the "
            "one that this was made from",
        )


@_rule("unsupported-op", "error")
def _unsupported(graph: Graph, config: QuantConfig) -> Iterator[_Found]:
    for line in unsupported(graph):
        yield _Found("graph", f"{line}; jq cannot run the model: replace or cut it off")


@_rule("non-finite", "error")
def _non_finite(graph: Graph, config: QuantConfig) -> Iterator[_Found]:
    # A Clip may well be open on one side.
    bounds = {k for k, nodes in graph.consumers.items() if all(n.op_type == "Clip" for n in nodes)}
    bad = {k: int(a.size - np.count_nonzero(np.isfinite(a))) for k, a in float_params(graph) if k not in bounds}
    bad = {k: n for k, n in bad.items() if n}
    if bad:
        yield _Found(
            next(iter(bad)),
            f"NaN or Inf in {_count(len(bad), 'constant tensor')} ({_list(f'{k}: {n}' for k, n in bad.items())}); no "
            "integer holds them: a mask of -Inf may be a finite number such as -100, anything else needs a new export",
        )


@_rule("float-type")
def _float_type(graph: Graph, config: QuantConfig) -> Iterator[_Found]:
    refused = {name for name, _ in weights_to_quantize(graph, config)}
    for dtype in ("float64", "float16", "bfloat16"):
        names = [k for k, a in graph.params.items() if a.dtype.name == dtype and a.size > 1]
        names += [v.name for v in graph.inputs if v.dtype is not None and v.dtype.name == dtype]
        if names:
            yield _Found(
                names[0],
                f"{dtype} in {_count(len(names), 'weight or input', 'weights or inputs')} ({_list(names)}); expected "
                "float32, which Q/DQ and the NPU's provider take: export the model in float32",
                "error" if not refused.isdisjoint(names) else None,
            )


@_rule("opset", "note", loaded=True)
def _opset(graph: Graph, config: QuantConfig) -> Iterator[_Found]:
    if "" not in graph.opsets:
        return
    opset = graph.opset()
    if opset < 7:
        text = "below 7, the oldest one promised: convert it with onnx.version_converter, or export again at 17"
    elif opset > 21:
        text = "and the NPU's compilers are tested with 17 to 21: export at one of these"
    elif 16 in (_bits(config.activation), _bits(config.weight)) and opset < 21:
        text = "16-bit Q/DQ need 21; below it those of com.microsoft are written"
    elif opset < 17:
        text = "the NPU's compilers are tested with 17 to 21: the result gets 17, where onnx can convert the model"
    else:
        return
    yield _Found("graph", f"opset {opset}; {text}", "warning" if opset < 7 or opset > 21 else None)


@_rule("dynamic-shape", loaded=True)
def _dynamic_shape(graph: Graph, config: QuantConfig) -> Iterator[_Found]:
    free = [v for v in graph.inputs if v.shape is None or any(not isinstance(d, int) for d in v.shape[1:])]
    if free:
        yield _Found(
            free[0].name,
            f"dims that are not known in {_count(len(free), 'input')} ({_list(map(str, free))}); the NPU's compiler "
            "needs numbers: fix them with onnxruntime.tools.make_dynamic_shape_fixed",
        )


@_rule("dynamic-batch", "note", loaded=True)
def _dynamic_batch(graph: Graph, config: QuantConfig) -> Iterator[_Found]:
    batch = [v for v in graph.inputs if v.shape and [i for i, d in enumerate(v.shape) if not isinstance(d, int)] == [0]]
    if batch:
        yield _Found(
            batch[0].name,
            f"free batch dim ({_list(map(str, batch))}); good for calibration, but fix it (usually to 1) before the "
            "NPU's compiler sees the model",
        )


@_rule("no-linear-op", "note")
def _no_linear(graph: Graph, config: QuantConfig) -> Iterator[_Found]:
    if not any(n.op_type in LINEAR for n in graph.walk()):
        weights = sum(a.size for _, a in float_params(graph))
        yield _Found(
            "graph",
            f"no Conv, ConvTranspose, Gemm or MatMul and {weights:,} weights: there is little that quantizing makes "
            "smaller or faster",
        )


@_rule("few-convs")
def _few_convs(graph: Graph, config: QuantConfig) -> Iterator[_Found]:
    count = sum(n.op_type == "Conv" for n in graph.nodes)
    if count < 2 and any(n.op_type in LINEAR for n in graph.walk()):
        yield _Found(
            "graph",
            f"{count} Conv in the main graph; the NPU's provider leaves a model with fewer than 2 on the CPU: lower "
            "minimum_num_of_conv in its configuration",
        )


@_rule("subgraph")
def _subgraphs(graph: Graph, config: QuantConfig) -> Iterator[_Found]:
    nodes = [n for n in graph.nodes if n.subgraphs]
    if nodes:
        inner = [m for n in nodes for g in n.subgraphs.values() for m in g.walk()]
        linear = [m for m in inner if m.op_type in LINEAR]
        yield _Found(
            nodes[0].label,
            f"{_list(_types(nodes))} with {_count(len(inner), 'node')} in subgraphs, {len(linear)} of them Conv, Gemm or "
            "MatMul; these stay in float on the CPU: export without control flow (fixed shapes and conditions)",
        )


@_rule("op-not-on-npu")
def _op_not_on_npu(graph: Graph, config: QuantConfig) -> Iterator[_Found]:
    wanted = _format(config)
    if not wanted:  # BF16's column leaves out Relu: its compiler takes float models and has its own say
        return
    steering = shape_arithmetic(graph)
    rewrites = {
        "Split": selected(graph, config.replace(op_types=None)) if "split_to_slice" in config.rewrites else (),
        "Sigmoid": selected(graph, config) if "sigmoid_to_hard_sigmoid" in config.forms else (),
    }

    def listed(node: Node) -> bool:
        return not node.domain and wanted in NPU_FORMATS.get(node.op_type, ())

    nodes = [n for n in graph.nodes if not (listed(n) or n in steering or n.subgraphs or is_quantized(n))]
    found = _grouped(nodes, lambda n: (n.qualified, n.outputs[0] in rewrites.get(n.qualified, ())))
    for (op, rewritten), nodes in sorted(found.items(), key=lambda item: -len(item[1])):
        if op == "HardSigmoid" and wanted == "XINT8":
            # x * HardSigmoid(x) is HardSwish, under which name it is listed; other slopes are `hard-sigmoid`'s.
            nodes = [n for n in nodes if is_hard_sigmoid(attributes(graph, n)) and not gates_itself(graph, n)]
        if nodes:
            severity, advice = _advice(graph, op, nodes, wanted, rewritten)
            text = f"{_count(len(nodes), f'{op} node')}, not listed for {wanted} on the NPU: {advice}"
            yield _Found(nodes[0].label, text, severity)


def _advice(graph: Graph, op: str, nodes: Sequence[Node], wanted: str, rewritten: bool) -> tuple[Severity, str]:
    """What to say of nodes of one operator that is not listed, and how loudly, if they are rewritten or not."""
    if op == "Split" and rewritten and wanted in NPU_FORMATS["Slice"]:
        return "note", "split_to_slice makes Slices of it, which are listed"
    if op == "Sigmoid" and rewritten and wanted == "XINT8":
        silu = sum(gates_itself(graph, n) for n in nodes)
        gates = f"; {silu} of them gate their own input, and become HardSwish" if silu else ""
        return "warning", (
            "sigmoid_to_hard_sigmoid makes HardSigmoid(1/6, 0.5) of it, up to 0.07 away: train with HardSigmoid or "
            f"HardSwish, or take A8W8, which lists Sigmoid{gates}"
        )
    if op == "HardSigmoid" and wanted == "XINT8":
        return "note", "its reference code has this form (1/6, 0.5), so look where the compiler puts it"
    listed = f"; listed for {', '.join(NPU_FORMATS[op])}" if op in NPU_FORMATS else ""
    return "warning", f"expect the CPU to run it and a transfer each way{listed}"


@_rule("leaky-slope")
def _leaky_slope(graph: Graph, config: QuantConfig) -> Iterator[_Found]:
    by_slope = _grouped(_nodes(graph, config, "LeakyRelu"), lambda n: float(attributes(graph, n)["alpha"]))
    for slope, nodes in by_slope.items():
        held = leaky_slope(slope) if math.isfinite(slope) else math.nan
        change = abs(held / slope - 1) if slope else abs(held)
        if not change <= 1e-6:
            yield _Found(
                nodes[0].label,
                f"alpha {slope:.6g} at {_count(len(nodes), 'LeakyRelu node')} becomes {held * 256:.6g}/256 = {held:.6g} "
                f"({_percent(change)} off), as the NPU holds n/256: train with such a slope (26/256 for 0.1)",
                "note" if change < 0.05 else None,
            )


@_rule("hard-sigmoid")
def _hard_sigmoid(graph: Graph, config: QuantConfig) -> Iterator[_Found]:
    found = [n for n in _nodes(graph, config, "HardSigmoid") if not is_hard_sigmoid(attributes(graph, n))]
    forms = _grouped(found, lambda n: tuple(float(attributes(graph, n)[name]) for name in ("alpha", "beta")))
    for (alpha, beta), nodes in forms.items():
        yield _Found(
            nodes[0].label,
            f"alpha {alpha:.6g}, beta {beta:.6g} at {_count(len(nodes), 'HardSigmoid node')}; the NPU has 1/6 and 0.5 "
            "alone, so the CPU runs it: train with these",
        )


@_rule("clip-range", "note")
def _clip_range(graph: Graph, config: QuantConfig) -> Iterator[_Found]:
    fused = absorbed(graph)

    def left(node: Node) -> bool:
        source = graph.producer.get(node.inputs[0])
        before = source and rule_of(graph, source)
        return bool(before and before.absorbs and graph.sole_reader(node.inputs[0])) and node.inputs[0] not in fused

    found = _grouped(filter(left, _nodes(graph, config, "Clip")), lambda n: limits(graph, n))
    for bounds, nodes in found.items() if config.fuse_activations else ():
        if bounds is not None:
            yield _Found(
                nodes[0].label,
                f"Clip({bounds[0]:.6g}, {bounds[1]:.6g}) at {_count(len(nodes), 'node')} after a Conv or its like; only "
                "(0, 6) and (0, 1), as inputs, and Relu are computed with it: here both tensors are rounded to 8 bits",
            )


@_rule("pool-size")
def _pool_size(graph: Graph, config: QuantConfig) -> Iterator[_Found]:
    for (op, window), nodes in _windows(graph, config).items():
        what, count = _pools(op, window, nodes), math.prod(window)
        splits = op == "GlobalAveragePool" and "split_large_pool" in config.rewrites and len(window) == 2
        if splits and split_kernel(window[0], window[1]) is not None:
            text = "more than 512 elements, so it is split into two pools and rounded twice: pool earlier in the model"
            yield _Found(nodes[0].label, f"{what}: {text}", "note")
        elif op != "ReduceMean" and is_too_large(window):
            text = f"{count} elements; the NPU takes up to 512, in sides up to 255: pool in two steps"
            yield _Found(nodes[0].label, f"{what}: {text}")


@_rule("pool-factor")
def _pool_factor(graph: Graph, config: QuantConfig) -> Iterator[_Found]:
    for (op, window), nodes in _windows(graph, config).items():
        if op != "ReduceMean" and is_too_large(window):
            continue  # `pool-size` has said so
        count = math.prod(window)
        multipliers = [reciprocal(d) for d in window] if op == "ReduceMean" else [pool_multiplier(window)]
        error = math.prod(m / 2**s for m, s in multipliers) * count - 1
        if abs(error) > 1e-9:
            fraction = " * ".join(f"{m}/{2**s}" for m, s in multipliers)
            yield _Found(
                nodes[0].label,
                f"{_pools(op, window, nodes)}: the NPU multiplies by {fraction} instead of 1/{count}, "
                f"{_percent(error, '+')} off{'' if len(set(window)) == 1 else ', which vendor tools do not simulate'}: "
                "a side that is a power of two is exact",
                "note" if abs(error) < _LARGE else None,
            )


def _windows(graph: Graph, config: QuantConfig) -> dict[tuple[str, tuple[int, ...]], list[Node]]:
    """Means by operator and by what they are over, where that is known."""
    nodes = _nodes(graph, config, "AveragePool", "GlobalAveragePool", "ReduceMean")
    found = _grouped(nodes, lambda n: (n.op_type, mean_window(graph, n)))
    return {key: nodes for key, nodes in found.items() if key[1]}


def _pools(op: str, window: Sequence[int], nodes: Sequence[Node]) -> str:
    return f"{_count(len(nodes), f'{op} node')} over {'x'.join(map(str, window))}"


@_rule("padded-average-pool")
def _padded_average(graph: Graph, config: QuantConfig) -> Iterator[_Found]:
    found = [
        n
        for n in _nodes(graph, config, "AveragePool")
        if not attributes(graph, n).get("count_include_pad", 0) and overhangs(graph, n)
    ]
    if found:
        windows = _list(sorted({"x".join(map(str, attributes(graph, n)["kernel_shape"])) for n in found}))
        yield _Found(
            found[0].label,
            f"{_count(len(found), 'AveragePool node')} ({windows}) whose windows overhang the border with "
            "count_include_pad=0; the NPU divides by the whole window, so values at the border are too small (in a 3x3 "
            "corner 4/9 of what they should be): export with count_include_pad=1, or leave the node in float",
        )


@_rule("channel-range")
def _channel_range(graph: Graph, config: QuantConfig) -> Iterator[_Found]:
    top = _largest_code(config)
    if config.per_channel or not top:
        return
    found: list[tuple[float, Node, str]] = []
    for node, name, ranges in channel_ranges(graph):
        live = ranges[ranges > _DECAYED * ranges.max(initial=0)]
        if live.size < 2:
            continue
        codes = live / live.max() * top
        weak, gone = np.count_nonzero(codes < _FEW_BITS_CODE), np.count_nonzero(codes < 0.5)
        # What training has let decay is far below the rest and vanishes without harm (ResNet-50 has such); channels
        # that keep a bit or two are ones that matter (depthwise layers of MobileNets), or so is the median one.
        if weak - gone >= _MANY * live.size or np.median(codes) < _FEW_BITS_CODE:
            ratio, least = codes.max() / np.median(codes), codes.max() / codes.min()
            text = (
                f"{name}: {weak} of {live.size}{f', {gone} of them all zero' * bool(gone)}; the largest is {ratio:.3g} "
            )
            found.append((weak / live.size, node, text + f"times the median and {least:.3g} times the smallest"))
    if found:
        found.sort(key=lambda f: -f[0])
        advice = (
            "equalize the layers (CLE), or finetune after quantizing"
            if config.scale == "power_of_two"
            else "set per_channel=True"
        )
        yield _Found(
            found[0][1].label,
            f"output channels get fewer than {_FEW_BITS} bits from one scale per tensor, in {_count(len(found), 'weight')} "
            f"({_list((text for _, _, text in found), ' | ')}): {advice}",
        )


@_rule("dead-channel", "note")
def _dead_channel(graph: Graph, config: QuantConfig) -> Iterator[_Found]:
    found: list[tuple[str, int, int]] = []
    for _, name, ranges in channel_ranges(graph):
        dead = int(np.count_nonzero(ranges <= _DEAD * ranges.max(initial=0)))
        if dead:
            found.append((name, dead, ranges.size))
    if found:
        total = sum(dead for _, dead, _ in found)
        found.sort(key=lambda f: -f[1] / f[2])
        yield _Found(
            found[0][0],
            f"{_count(total, 'output channel')} with weights all zero (below {_DEAD:g} of the tensor's largest), in "
            f"{_count(len(found), 'weight')} ({_list(f'{k}: {dead} of {size}' for k, dead, size in found)}): "
            "they cost time and give a constant; prune them",
        )


@_rule("constant-range")
def _constant(graph: Graph, config: QuantConfig) -> Iterator[_Found]:
    found: dict[str, list[tuple[str, Node]]] = {}
    top, floats = _largest_code(config), dict(float_params(graph))
    for node in graph.nodes if top else ():
        for name in dict.fromkeys(node.inputs if node.op_type in _ELEMENTWISE and not node.domain else ()):
            size = np.abs(floats.get(name, np.zeros(0))).astype(np.float64).reshape(-1)
            size = size[np.isfinite(size) & (size > 0)]
            if not size.size:
                continue
            largest, lost = size.max(), np.count_nonzero(size < size.max() / top / 2)
            text = f"{name} of {node.label}: {largest:.3g}"
            if largest >= _HUGE and node.op_type in ("Add", "Sub", "Where", "Max", "Min"):
                found.setdefault(_TOO_LARGE, []).append((text, node))
            elif largest < _TINY and node.op_type in ("Add", "Max") and is_guarded(graph, node):
                found.setdefault(_TOO_SMALL, []).append((text, node))
            elif lost >= _VANISHING * size.size:
                text = f"{name} of {node.label}: {lost} of {size.size} beside {largest:.3g}"
                found.setdefault(_TOO_WIDE, []).append((text, node))
    for message, operands in found.items():
        what = f"{_count(len(operands), 'constant operand')} {message} ({_list((t for t, _ in operands), ' | ')})"
        yield _Found(operands[0][1].label, what)


_TOO_LARGE = (
    "so large that at one scale with them nothing is left of other values; where it masks before a Softmax, -100 does "
    "as well, otherwise leave the node in float"
)
_TOO_SMALL = (
    "so small that an 8-bit sum does not show it, so the division, root or logarithm after it is not guarded: leave "
    "these nodes in float"
)
_TOO_WIDE = (
    "at least half of whose elements round to zero at the scale of the largest: use two constants, or leave the node "
    "in float"
)
_ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div", "Where", "Max", "Min", "PRelu"})


# What rules share.


def _grouped(nodes: Iterable[Node], key: Callable[[Node], _Key]) -> dict[_Key, list[Node]]:
    found: dict[_Key, list[Node]] = {}
    for node in nodes:
        found.setdefault(key(node), []).append(node)
    return found


def _list(items: Iterable[str], separator: str = ", ") -> str:
    """At most five of the items, and how many more there are."""
    items = list(items)
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return separator.join(items[:_SHOWN]) + more


def _count(number: int, noun: str, nouns: str = "") -> str:
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def _percent(ratio: float, sign: str = "") -> str:
    return f"{ratio:{sign}.2%}"


def _types(nodes: Iterable[Node]) -> Iterable[str]:
    return dict.fromkeys(n.qualified for n in nodes)


def _format(config: QuantConfig) -> str:
    """The vendor's name of a format of integers, in which int8 with float scales is A8W8 whatever else; or empty."""
    bits = _bits(config.activation)
    if config.scale == "power_of_two":
        return "XINT8" if bits == 8 else ""
    return {16: "A16W8", 8: "A8W8"}.get(bits, "")


def _bits(format: object) -> int:
    return format.bits if isinstance(format, Integer) else 0


def _largest_code(config: QuantConfig) -> float:
    """Of a weight; 0 where weights have no scale per tensor or channel."""
    weight = config.weight
    return (weight.narrow.qmax - weight.narrow.qmin) / 2 if isinstance(weight, Integer) else 0.0


def _nodes(graph: Graph, config: QuantConfig, *ops: str) -> Iterator[Node]:
    """The nodes of these operators that are quantized, if the format is the one whose NPU arithmetic is known."""
    if _format(config) == "XINT8":
        chosen = selected(graph, config)
        yield from (n for n in graph.nodes if n.op_type in ops and not n.domain and n.outputs[0] in chosen)
