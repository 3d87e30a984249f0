"""What will not go well on the NPU or in 8 bits, told before quantizing.

A rule is one function of a graph and a config that yields findings; `@_rule` puts it in the table, in
the order of this file. Rules see the graph as `prepare` leaves it, so that what is folded away is no
finding, unless they ask for the graph as loaded. What repeats is one finding with a count.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np
from onnx import ModelProto

from jq.config import QuantConfig, resolve
from jq.formats import Integer
from jq.graph import Graph, Node, Value
from jq.onnx_read import load
from jq.prepare import prepare
from jq.registry import defaults
from jq.trace import unsupported

Severity = Literal["error", "warning", "note"]
Check = Callable[[Graph, QuantConfig], Iterable["Finding"]]


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
    found = [f for rule in RULES for f in rule.check(loaded if rule.loaded else prepared, options)]
    return sorted(found, key=lambda f: get_args(Severity).index(f.severity))


@dataclasses.dataclass(frozen=True)
class Rule:
    """A check, and which graph it wants."""

    check: Check
    loaded: bool  # the graph as loaded; else as `prepare` leaves it


RULES: list[Rule] = []


def _rule(*, loaded: bool = False) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        RULES.append(Rule(check, loaded))
        return check

    return add


# Which formats list an operator for the NPU. Source: amd/ryzen-ai-documentation, docs/ops_support.rst, the table
# of Ryzen AI 1.5.0 (what we know of 1.8's agrees). "Listed" is broad coverage, not every configuration.
NPU_FORMATS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        op: tuple(formats.split())
        for formats, ops in {
            "XINT8 A8W8 A16W8 BF16": "Add AveragePool BatchNormalization Concat Constant ConstantOfShape Conv "
            "DepthToSpace Div Expand Flatten Gemm GlobalAveragePool Identity InstanceNormalization MatMul Max MaxPool "
            "Min Mul Pad Reciprocal ReduceMax Reshape Shape Slice Sqrt Squeeze Sub Transpose Unsqueeze",
            "XINT8 A8W8 A16W8": "Clip DequantizeLinear Gelu GlobalMaxPool GroupNormalization LeakyRelu Relu Softmax "
            "Upsample",
            "XINT8 A8W8 BF16": "ReduceMean ReduceMin ReduceSum Resize",
            "XINT8 A16W8 BF16": "Tanh Where",
            "A8W8 A16W8 BF16": "ConvTranspose Sigmoid Sin",
            "XINT8 A8W8": "HardSwish",
            "XINT8 A16W8": "Elu TopK",
            "XINT8 BF16": "Abs And ArgMax ArgMin BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast Ceil CumSum "
            "Equal Erf Floor Greater Less Log Neg Or Pow Round Sign Tile",
            "A8W8 A16W8": "Cos QLinearConv QuantizeLinear",
            "A16W8 BF16": "Exp GatherElements Split",
            "XINT8": "Celu GreaterOrEqual LayerNormalization LessOrEqual Mish Range STFT Shrink Softsign "
            "ThresholdedRelu",
            "A8W8": "HardSigmoid QLinearMatMul",
            "BF16": "Einsum Gather GridSample GroupConv LSTM Mod Not ScatterND Size Xor",
        }.items()
        for op in ops.split()
    }
)

_QUANTIZED = (  # beginnings of operator names
    *("QuantizeLinear", "DequantizeLinear", "DynamicQuantize", "QLinear", "QGemm", "QAttention", "ConvInteger"),
    *("MatMulInteger", "MatMulNBits", "ExtendedQuantize", "ExtendedDequantize", "BFPQuantize", "MXQuantize"),
)
_LINEAR = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
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


@_rule(loaded=True)
def _already_quantized(graph: Graph, config: QuantConfig) -> Iterator[Finding]:
    found = [n for n in graph.walk() if _is_quantized(n)]
    if found:
        yield Finding(
            "already-quantized",
            "error",
            found[0].label,
            f"{_count(len(found), 'node')} of a quantized model ({_list(_types(found))}); expected a float model: quantize the "
            "one that this was made from",
        )


@_rule()
def _unsupported(graph: Graph, config: QuantConfig) -> Iterator[Finding]:
    for line in unsupported(graph):
        yield Finding("unsupported-op", "error", "graph", f"{line}; jq cannot run the model: replace or cut it off")


@_rule()
def _non_finite(graph: Graph, config: QuantConfig) -> Iterator[Finding]:
    # A Clip may well be open on one side.
    bounds = {k for k, nodes in graph.consumers.items() if all(n.op_type == "Clip" for n in nodes)}
    bad = {k: int(a.size - np.count_nonzero(np.isfinite(a))) for k, a in _floats(graph) if k not in bounds}
    bad = {k: n for k, n in bad.items() if n}
    if bad:
        yield Finding(
            "non-finite",
            "error",
            next(iter(bad)),
            f"NaN or Inf in {_count(len(bad), 'constant tensor')} ({_list(f'{k}: {n}' for k, n in bad.items())}); no "
            "integer holds them: a mask of -Inf may be a finite number such as -100, anything else needs a new export",
        )


@_rule(loaded=True)
def _float_type(graph: Graph, config: QuantConfig) -> Iterator[Finding]:
    for dtype in ("float64", "float16", "bfloat16"):
        names = [k for k, a in graph.params.items() if a.dtype.name == dtype and a.size > 1]
        names += [v.name for v in graph.inputs if v.dtype is not None and v.dtype.name == dtype]
        if names:
            yield Finding(
                "float-type",
                "warning",
                names[0],
                f"{dtype} in {_count(len(names), 'weight or input', 'weights or inputs')} ({_list(names)}); expected "
                "float32, which Q/DQ and the NPU's provider take: export the model in float32",
            )


@_rule(loaded=True)
def _opset(graph: Graph, config: QuantConfig) -> Iterator[Finding]:
    if "" not in graph.opsets:
        return
    opset, needs = graph.opset(), 13 if config.per_channel else 10
    what = "scales per channel" if config.per_channel else "Q/DQ"
    if 16 in (_bits(config.activation), _bits(config.weight)):
        needs, what = 21, "16-bit Q/DQ (or those of com.microsoft)"
    if opset < 7:
        severity: Severity = "warning"
        text = "below 7, the oldest one promised: convert it with onnx.version_converter, or export again at 17"
    elif opset > 21:
        severity, text = "warning", "and the NPU's compilers are tested with 17 to 21: export at one of these"
    elif opset < 17:
        severity = "note"
        raised = f"{what} need {needs}, so the result gets a newer one; " if opset < needs else ""
        text = f"{raised}the NPU's compilers are tested with 17 to 21: if one refuses the model, export at 17"
    elif opset < needs:
        severity, text = "note", f"{what} need {needs}, so the result gets a newer one or the other domain"
    else:
        return
    yield Finding("opset", severity, "graph", f"opset {opset}; {text}")


@_rule(loaded=True)
def _dynamic_shape(graph: Graph, config: QuantConfig) -> Iterator[Finding]:
    free = [v for v in graph.inputs if v.shape is None or any(not isinstance(d, int) for d in v.shape[1:])]
    if free:
        yield Finding(
            "dynamic-shape",
            "warning",
            free[0].name,
            f"dims that are not known in {_count(len(free), 'input')} ({_list(map(str, free))}); the NPU's compiler "
            "needs numbers: fix them with onnxruntime.tools.make_dynamic_shape_fixed",
        )
    batch = [v for v in graph.inputs if v not in free and v.shape and not isinstance(v.shape[0], int)]
    if batch:
        yield Finding(
            "dynamic-batch",
            "note",
            batch[0].name,
            f"free batch dim ({_list(map(str, batch))}); good for calibration, but fix it (usually to 1) before the "
            "NPU's compiler sees the model",
        )


@_rule()
def _no_linear(graph: Graph, config: QuantConfig) -> Iterator[Finding]:
    if not any(n.op_type in _LINEAR for n in graph.walk()):
        weights = sum(a.size for _, a in _floats(graph))
        yield Finding(
            "no-linear-op",
            "note",
            "graph",
            f"no Conv, ConvTranspose, Gemm or MatMul and {weights:,} weights: there is little that quantizing makes "
            "smaller or faster",
        )


@_rule()
def _few_convs(graph: Graph, config: QuantConfig) -> Iterator[Finding]:
    count = sum(n.op_type == "Conv" for n in graph.nodes)
    if count < 2 and any(n.op_type in _LINEAR for n in graph.walk()):
        yield Finding(
            "few-convs",
            "warning",
            "graph",
            f"{count} Conv in the main graph; the NPU's provider leaves a model with fewer than 2 on the CPU: lower "
            "minimum_num_of_conv in its configuration",
        )


@_rule()
def _subgraphs(graph: Graph, config: QuantConfig) -> Iterator[Finding]:
    nodes = [n for n in graph.nodes if n.subgraphs]
    if nodes:
        inner = [m for n in nodes for g in n.subgraphs.values() for m in g.walk()]
        linear = [m for m in inner if m.op_type in _LINEAR]
        yield Finding(
            "subgraph",
            "warning",
            nodes[0].label,
            f"{_list(_types(nodes))} with {_count(len(inner), 'node')} in subgraphs, {len(linear)} of them Conv, Gemm or "
            "MatMul; these stay in float on the CPU: export without control flow (fixed shapes and conditions)",
        )


@_rule()
def _op_not_on_npu(graph: Graph, config: QuantConfig) -> Iterator[Finding]:
    wanted = _format(config)
    if not wanted:  # BF16's column leaves out Relu: its compiler takes float models and has its own say
        return
    steering = _shape_arithmetic(graph)
    found: dict[str, list[Node]] = {}
    for node in graph.nodes:
        listed = () if node.domain else NPU_FORMATS.get(node.op_type, ())
        if wanted not in listed and not (node in steering or node.subgraphs or _is_quantized(node)):
            found.setdefault(node.qualified, []).append(node)
    for op, nodes in sorted(found.items(), key=lambda item: -len(item[1])):
        if op == "HardSigmoid" and wanted == "XINT8":
            # x * HardSigmoid(x) is HardSwish, under which name it is listed; other slopes are `hard-sigmoid`'s.
            nodes = [n for n in nodes if _is_npu_hard_sigmoid(graph, n) and not _gates_itself(graph, n)]
        if nodes:
            yield _not_listed(graph, op, nodes, wanted)


def _not_listed(graph: Graph, op: str, nodes: Sequence[Node], wanted: str) -> Finding:
    """What to say of nodes of one operator that is not listed."""
    severity: Severity = "warning"
    others = NPU_FORMATS.get(op, ())
    advice = "expect the CPU to run it and a transfer each way" + (f"; listed for {', '.join(others)}" * bool(others))
    if op == "Split" and wanted in ("XINT8", "A8W8"):
        severity, advice = "note", "the default rewrites make Slices of it, which are listed"
    elif op == "Sigmoid" and wanted == "XINT8":
        silu = sum(_gates_itself(graph, n) for n in nodes)
        gates = f"; {silu} of them gate their own input, and become HardSwish" if silu else ""
        advice = (
            "the default rewrites make HardSigmoid(1/6, 0.5) of it, up to 0.07 away: train with HardSigmoid or "
            f"HardSwish, or take A8W8, which lists Sigmoid{gates}"
        )
    elif op == "HardSigmoid" and wanted == "XINT8":
        severity, advice = "note", "its reference code has this form (1/6, 0.5), so look where the compiler puts it"
    found = f"{_count(len(nodes), f'{op} node')}, not listed for {wanted} on the NPU: {advice}"
    return Finding("op-not-on-npu", severity, nodes[0].label, found)


@_rule()
def _leaky_slope(graph: Graph, config: QuantConfig) -> Iterator[Finding]:
    by_slope: dict[float, list[Node]] = {}
    for node in _nodes(graph, config, "LeakyRelu"):
        by_slope.setdefault(float(_attrs(graph, node)["alpha"]), []).append(node)
    for slope, nodes in by_slope.items():
        held = round(slope * 256) / 256 if math.isfinite(slope) else math.nan
        change = abs(held / slope - 1) if slope else abs(held)
        if not change <= 1e-6:
            yield Finding(
                "leaky-slope",
                "note" if change < 0.05 else "warning",
                nodes[0].label,
                f"alpha {slope:.6g} at {_count(len(nodes), 'LeakyRelu node')} becomes {held * 256:.6g}/256 = {held:.6g} "
                f"({_percent(change)} off), as the NPU holds n/256: train with such a slope (26/256 for 0.1)",
            )


@_rule()
def _hard_sigmoid(graph: Graph, config: QuantConfig) -> Iterator[Finding]:
    by_form: dict[tuple[float, float], list[Node]] = {}
    for node in _nodes(graph, config, "HardSigmoid"):
        attrs = _attrs(graph, node)
        by_form.setdefault((float(attrs["alpha"]), float(attrs["beta"])), []).append(node)
    for (alpha, beta), nodes in by_form.items():
        if not _is_npu_hard_sigmoid(graph, nodes[0]):
            yield Finding(
                "hard-sigmoid",
                "warning",
                nodes[0].label,
                f"alpha {alpha:.6g}, beta {beta:.6g} at {_count(len(nodes), 'HardSigmoid node')}; the NPU has 1/6 and 0.5 "
                "alone, so the CPU runs it: train with these",
            )


@_rule()
def _clip_range(graph: Graph, config: QuantConfig) -> Iterator[Finding]:
    by_range: dict[tuple[float, float], list[Node]] = {}
    for node in _nodes(graph, config, "Clip"):
        source = graph.producer.get(node.inputs[0])
        limits = _limits(graph, node)
        if source and source.op_type in _FUSING and limits and graph.sole_reader(node.inputs[0]):
            by_range.setdefault(limits, []).append(node)
    for (low, high), nodes in by_range.items():
        if (low, high) not in ((0, 6), (0, 1)):
            yield Finding(
                "clip-range",
                "note",
                nodes[0].label,
                f"Clip({low:.6g}, {high:.6g}) at {_count(len(nodes), 'node')} after a Conv or its like; only (0, 6), "
                "(0, 1) and Relu are computed with it: here both tensors are rounded to 8 bits",
            )


# After these the quantizer takes an activation for a part of them.
_FUSING = frozenset({"Conv", "Add", "MaxPool", "AveragePool", "GlobalAveragePool", "MatMul", "Gemm", "ConvTranspose"})


@_rule()
def _pool_factor(graph: Graph, config: QuantConfig) -> Iterator[Finding]:
    by_window: dict[tuple[str, tuple[int, ...]], list[Node]] = {}
    for node in _nodes(graph, config, "AveragePool", "GlobalAveragePool", "ReduceMean"):
        if window := _window(graph, node):
            by_window.setdefault((node.op_type, window), []).append(node)
    for (op, window), nodes in by_window.items():
        what = f"{_count(len(nodes), f'{op} node')} over {'x'.join(map(str, window))}"
        count, pool = math.prod(window), op != "ReduceMean"
        if pool and count > 512 and op == "GlobalAveragePool" and max(window) <= 512:
            text = "more than 512 elements, so it is split into two pools and rounded twice: pool earlier in the model"
            yield Finding("pool-size", "note", nodes[0].label, f"{what}: {text}")
        elif pool and (count > 512 or max(window) > 255):
            text = f"{count} elements; the NPU takes up to 512, in sides up to 255: pool in two steps"
            yield Finding("pool-size", "warning", nodes[0].label, f"{what}: {text}")
        elif abs(error := pool_factor(window, table=pool) * count - 1) > 1e-9:
            yield Finding(
                "pool-factor",
                "note" if abs(error) < _LARGE else "warning",
                nodes[0].label,
                f"{what}: the NPU multiplies by {_fraction(window, pool)} instead of 1/{count}, {_percent(error, '+')} "
                f"off{'' if len(set(window)) == 1 else ', which vendor tools do not simulate'}: "
                "a side that is a power of two is exact",
            )


@_rule()
def _padded_average(graph: Graph, config: QuantConfig) -> Iterator[Finding]:
    found = [
        n
        for n in _nodes(graph, config, "AveragePool")
        if not _attrs(graph, n).get("count_include_pad", 0) and _overhangs(graph, n)
    ]
    if found:
        windows = _list(sorted({"x".join(map(str, _attrs(graph, n)["kernel_shape"])) for n in found}))
        yield Finding(
            "padded-average-pool",
            "warning",
            found[0].label,
            f"{_count(len(found), 'AveragePool node')} ({windows}) whose windows overhang the border with "
            "count_include_pad=0; the NPU divides by the whole window, so values at the border are too small (in a 3x3 "
            "corner 4/9 of what they should be): export with count_include_pad=1, or leave the node in float",
        )


@_rule()
def _channel_range(graph: Graph, config: QuantConfig) -> Iterator[Finding]:
    top = _largest_code(config)
    if config.per_channel or not top:
        return
    found: list[tuple[float, Node, str]] = []
    for node, name, ranges in _channels(graph):
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
        yield Finding(
            "channel-range",
            "warning",
            found[0][1].label,
            f"output channels get fewer than {_FEW_BITS} bits from one scale per tensor, in {_count(len(found), 'weight')} "
            f"({_list((text for _, _, text in found), ' | ')}): {advice}",
        )


@_rule()
def _dead_channel(graph: Graph, config: QuantConfig) -> Iterator[Finding]:
    found: list[tuple[str, int, int]] = []
    for _, name, ranges in _channels(graph):
        dead = int(np.count_nonzero(ranges <= _DEAD * ranges.max(initial=0)))
        if dead:
            found.append((name, dead, ranges.size))
    if found:
        total = sum(dead for _, dead, _ in found)
        found.sort(key=lambda f: -f[1] / f[2])
        yield Finding(
            "dead-channel",
            "note",
            found[0][0],
            f"{_count(total, 'output channel')} with weights all zero (below {_DEAD:g} of the tensor's largest), in "
            f"{_count(len(found), 'weight')} ({_list(f'{k}: {dead} of {size}' for k, dead, size in found)}): "
            "they cost time and give a constant; prune them",
        )


@_rule()
def _constant(graph: Graph, config: QuantConfig) -> Iterator[Finding]:
    found: dict[str, list[tuple[str, Node]]] = {}
    top, floats = _largest_code(config), dict(_floats(graph))
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
            elif largest < _TINY and node.op_type in ("Add", "Max") and _is_guarded(graph, node):
                found.setdefault(_TOO_SMALL, []).append((text, node))
            elif lost >= _VANISHING * size.size:
                text = f"{name} of {node.label}: {lost} of {size.size} beside {largest:.3g}"
                found.setdefault(_TOO_WIDE, []).append((text, node))
    for message, operands in found.items():
        what = f"{_count(len(operands), 'constant operand')} {message} ({_list((t for t, _ in operands), ' | ')})"
        yield Finding("constant-range", "warning", operands[0][1].label, what)


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


def _is_guarded(graph: Graph, node: Node) -> bool:
    """Whether an operator that zero would break reads the node's output: what was added is an epsilon."""
    return any(
        n.op_type in ("Sqrt", "Reciprocal", "Log", "Pow") or (n.op_type == "Div" and n.inputs[1] in node.outputs)
        for n in graph.consumers.get(node.outputs[0], ())
    )


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


def _is_quantized(node: Node) -> bool:
    return node.op_type.startswith(_QUANTIZED)


def _nodes(graph: Graph, config: QuantConfig, *ops: str) -> Iterator[Node]:
    """The nodes of these operators, if the format is the one whose NPU arithmetic is known."""
    if _format(config) == "XINT8":
        yield from (n for n in graph.nodes if n.op_type in ops and not n.domain)


def _attrs(graph: Graph, node: Node) -> Mapping[str, Any]:
    return {**defaults(node.op_type, node.domain, graph.opset(node.domain)), **node.attrs}


def _floats(graph: Graph) -> Iterator[tuple[str, np.ndarray]]:
    """The float weights by name, as types that numpy computes with."""
    for name, array in graph.params.items():
        if array.dtype.kind == "f":
            yield name, array
        elif array.dtype.name == "bfloat16":
            yield name, array.astype(np.float32)


def _shape_arithmetic(graph: Graph) -> set[Node]:
    """Nodes that compute on shapes alone: with a fixed batch they fold away, and `dynamic-batch` says so."""
    known = set(graph.arrays)
    found = set()
    for node in graph.nodes:
        if node.op_type in ("Shape", "Size") or all(r in known for r in node.reads()):
            found.add(node)
            known.update(node.outputs)
    return found


def _gates_itself(graph: Graph, node: Node) -> bool:
    """Whether a sigmoid's input is multiplied by it, and by nothing else."""
    reader = graph.sole_reader(node.outputs[0])
    return reader is not None and reader.op_type == "Mul" and node.inputs[0] in reader.inputs


def _is_npu_hard_sigmoid(graph: Graph, node: Node) -> bool:
    attrs = _attrs(graph, node)  # exporters write 1/6 with as few as four digits
    return abs(attrs["alpha"] - 1 / 6) < 1e-4 and abs(attrs["beta"] - 0.5) < 1e-6


def _shape(graph: Graph, name: str) -> tuple[int | str | None, ...]:
    return graph.values.get(name, Value(name)).shape or ()


def _limits(graph: Graph, node: Node) -> tuple[float, float] | None:
    """The bounds of a Clip; None if they are not constant."""
    bounds = [-math.inf, math.inf]
    for i, name in enumerate(("min", "max")):
        tensor = node.inputs[i + 1] if len(node.inputs) > i + 1 else ""
        if not tensor:
            bounds[i] = float(node.attrs.get(name, bounds[i]))
        elif tensor not in graph.arrays or graph.arrays[tensor].size != 1:
            return None
        else:
            bounds[i] = float(graph.arrays[tensor].item())
    return bounds[0], bounds[1]


def _window(graph: Graph, node: Node) -> tuple[int, ...]:
    """What an average is over; empty where that is not known."""
    if node.op_type == "AveragePool":
        window: Sequence[Any] = _attrs(graph, node).get("kernel_shape", ())
    else:
        shape = _shape(graph, node.inputs[0])
        axes: Iterable[int] = range(2, len(shape))
        if node.op_type == "ReduceMean":
            axes = node.attrs.get("axes", ())
            if len(node.inputs) > 1 and node.inputs[1]:
                axes = graph.arrays.get(node.inputs[1], np.zeros(0, np.int64)).reshape(-1).tolist()
            axes = sorted({a % len(shape) for a in axes if -len(shape) <= a < len(shape)} if shape else ())
        window = [shape[a] for a in axes]
    return tuple(window) if all(isinstance(d, int) and d > 0 for d in window) else ()


# Factors of square windows that are not what the search finds: (multiplier, shift).
_SQUARES = {3: (7, 6), 5: (10, 8), 6: (7, 8), 7: (21, 10), 14: (21, 12)}


def _factor(count: int) -> tuple[int, int]:
    """The multiplier and shift nearest to 1 / count that the NPU's compiler finds."""
    last = math.ceil(math.log2(128 * count))
    return min(((round(2**s / count), s) for s in range(last)), key=lambda f: abs(f[0] / 2 ** f[1] - 1 / count))


def pool_factor(window: Sequence[int], *, table: bool = True) -> float:
    """Return what the NPU multiplies a window's sum by: one multiplier and shift, or (no table) one for each axis.

    >>> pool_factor((3, 3)) * 9
    0.984375
    """
    return math.prod(m / 2**s for m, s in _factors(window, table))


def _factors(window: Sequence[int], table: bool) -> list[tuple[int, int]]:
    if not table:
        return [_factor(d) for d in window]
    square = len(window) == 2 and window[0] == window[1]
    return [_SQUARES[window[0]] if square and window[0] in _SQUARES else _factor(math.prod(window))]


def _fraction(window: Sequence[int], table: bool) -> str:
    return " * ".join(f"{m}/{2**s}" for m, s in _factors(window, table))


def _overhangs(graph: Graph, node: Node) -> bool:
    """Whether some windows of a pool reach over the border."""
    attrs = _attrs(graph, node)
    kernel = attrs.get("kernel_shape", ())
    rank = len(kernel)
    pads = attrs.get("pads") or (0,) * 2 * rank
    strides, dilations = attrs.get("strides") or (1,) * rank, attrs.get("dilations") or (1,) * rank
    auto = attrs.get("auto_pad", "NOTSET")
    auto = auto.decode() if isinstance(auto, bytes) else auto
    if auto == "NOTSET" and any(pads):
        return True
    if auto == "VALID" or (auto == "NOTSET" and not attrs.get("ceil_mode", 0)):
        return False
    sizes = _shape(graph, node.inputs[0])[2:]
    for size, k, stride, dilation in itertools.zip_longest(sizes[:rank], kernel, strides, dilations):
        reach = (k - 1) * dilation + 1
        if not isinstance(size, int):
            if auto != "NOTSET" and reach > stride:  # at least where the stride divides the size
                return True
        elif auto == "NOTSET":
            if (size - reach) % stride:  # the last window is a partial one
                return True
        elif (math.ceil(size / stride) - 1) * stride + reach > size:
            return True
    return False


def _channels(graph: Graph) -> Iterator[tuple[Node, str, np.ndarray]]:
    """The largest magnitude in each output channel of each weight, weights that several nodes share once."""
    seen: set[str] = set()
    floats = dict(_floats(graph))
    for node in graph.nodes:
        if node.op_type not in _LINEAR or node.domain or len(node.inputs) < 2 or node.inputs[1] in seen:
            continue
        weight = floats.get(node.inputs[1])
        if weight is None or weight.ndim < 2 or not weight.size:
            continue
        seen.add(node.inputs[1])
        ranges = _ranges(node, weight)
        if np.isfinite(ranges).all():  # else `non-finite` has said so
            yield node, node.inputs[1], ranges.astype(np.float64)


def _ranges(node: Node, weight: np.ndarray) -> np.ndarray:
    if node.op_type == "ConvTranspose":  # (in, out / group, ...), where the rows of a group stand together
        group = max(1, int(node.attrs.get("group", 1)))
        group = group if weight.shape[0] % group == 0 else 1
        weight = weight.reshape(group, weight.shape[0] // group, weight.shape[1], -1)
        kept: tuple[int, ...] = (0, 2)
    elif node.op_type == "Conv" or (node.op_type == "Gemm" and node.attrs.get("transB", 0)):
        kept = (0,)
    else:
        kept = (weight.ndim - 1,)
    axes = tuple(a for a in range(weight.ndim) if a not in kept)
    return np.maximum(weight.max(axes), -weight.min(axes)).reshape(-1)
