"""Rules of `lint` on the NPU: the operators that it has, and the numbers that it computes in them."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jq.arithmetic.formats import Integer
from jq.config import QuantConfig
from jq.evidence.lint_rules import Found, Rule, Severity, counted, grouped, listed, rule
from jq.graph import Graph, Node, Value
from jq.graph.quantizers import is_quantized
from jq.graph.schemas import attributes
from jq.npu.facts import NPU_FORMATS, is_hard_sigmoid, is_too_large, leaky_slope, pool_multiplier, reciprocal
from jq.npu.rewrites import KEEPS_WHOLE, STRUCTURE
from jq.npu.rewrites.activations import gates_itself
from jq.npu.rewrites.pools import reduced_axes, split_kernel
from jq.ops.kinds import macs, multiplies
from jq.passes.prepare import made_of, vendor_format
from jq.plan.outputs import pooled_outputs
from jq.plan.placement import absorbed, rule_of
from jq.plan.selection import selected

RULES: list[Rule] = []
_rule = functools.partial(rule, RULES)
_LARGE = 0.01  # relative difference from which a change of the model is a warning, below which a note


@_rule("op-not-on-npu")
def _op_not_on_npu(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    wanted = vendor_format(config)
    if not wanted:  # BF16's column leaves out Relu: its compiler takes float models and has its own say
        return
    steering = _shape_arithmetic(graph)
    rewrites = {
        "Split": selected(graph, config.replace(op_types=None)) if "split_to_slice" in config.rewrites else (),
        "Sigmoid": selected(graph, config) if "sigmoid_to_hard_sigmoid" in config.forms else (),
    }

    def on_npu(node: Node) -> bool:
        return not node.domain and wanted in NPU_FORMATS.get(node.op_type, ())

    nodes = [n for n in graph.nodes if not (on_npu(n) or n in steering or n.subgraphs or is_quantized(n))]
    by_operator = grouped(nodes, lambda n: (n.qualified, n.outputs[0] in rewrites.get(n.qualified, ())))
    for (op, rewritten), nodes in sorted(by_operator.items(), key=lambda item: -len(item[1])):
        if op == "HardSigmoid" and wanted == "XINT8":
            # x * HardSigmoid(x) is HardSwish, under which name it is listed; other slopes are `hard-sigmoid`'s.
            nodes = [n for n in nodes if is_hard_sigmoid(attributes(graph, n)) and not gates_itself(graph, n)]
        if nodes:
            severity, advice = _advice(graph, config, op, nodes, rewritten)
            text = f"{counted(len(nodes), f'{op} node')}, not listed for {wanted} on the NPU: {advice}"
            yield Found(nodes[0].label, text, severity)


def _advice(graph: Graph, config: QuantConfig, op: str, nodes: Sequence[Node], rewritten: bool) -> tuple[Severity, str]:
    """Severity and advice for nodes of one operator that is not listed."""
    wanted = vendor_format(config)
    if op == "Split" and rewritten and wanted in NPU_FORMATS["Slice"]:
        return "note", "split_to_slice turns it into Slices, which are listed"
    if op == "Sigmoid" and rewritten and wanted == "XINT8":
        silu = sum(gates_itself(graph, n) for n in nodes)
        gates = f"; {silu} of them gate their own input: HardSwish is listed for that" if silu else ""
        form = "sigmoid_to_hard_sigmoid turns it into HardSigmoid(1/6, 0.5), which differs by up to 0.07"
        if config.form_loss is not None:
            form = f"it becomes HardSigmoid(1/6, 0.5) if that loses at most form_loss={config.form_loss:g} on the data"
        return "warning", f"{form}: train with HardSigmoid or HardSwish, or use A8W8, which lists Sigmoid{gates}"
    if op == "HardSigmoid" and wanted == "XINT8":
        return "note", "the vendor's reference code has this form (1/6, 0.5), so check where the compiler places it"
    listed = f"; listed for {', '.join(NPU_FORMATS[op])}" if op in NPU_FORMATS else ""
    slices = "; whole in the config turns Gathers at constant, equal distances into Slices" if op == "Gather" else ""
    return "warning", f"expect it to run on the CPU, with a transfer each way{listed}{slices}"


@_rule("research-format")
def _research_format(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    """Formats that are there to be compared in research: no document of the NPU has them."""
    formats = {"activation": config.activation, "weight": config.weight}
    parts = [f"{role} in {f}" for role, f in formats.items() if isinstance(f, Integer) and f.bits < 8]
    if config.scale == "power_of_two" and config.per_channel:
        parts.append("one power of two for each channel")
    if parts:
        text = (
            f"{', '.join(parts)}: no NPU of the family runs this model; it is for research; ship XINT8, A8W8 or A16W8"
        )
        yield Found("config", text)


@_rule("leaky-slope")
def _leaky_slope(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    by_slope = grouped(_nodes(graph, config, "LeakyRelu"), lambda n: float(attributes(graph, n)["alpha"]))
    for slope, nodes in by_slope.items():
        held = leaky_slope(slope) if math.isfinite(slope) else math.nan
        change = abs(held / slope - 1) if slope else abs(held)
        if not change <= 1e-6:
            yield Found(
                nodes[0].label,
                f"alpha {slope:.6g} at {counted(len(nodes), 'LeakyRelu node')} becomes {held * 256:.6g}/256 = {held:.6g} "
                f"({_percent(change)} off), as the NPU holds n/256: train with such a slope (26/256 for 0.1)",
                "note" if change < 0.05 else None,
            )


@_rule("hard-sigmoid")
def _hard_sigmoid(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    others = [n for n in _nodes(graph, config, "HardSigmoid") if not is_hard_sigmoid(attributes(graph, n))]
    forms = grouped(others, lambda n: tuple(float(attributes(graph, n)[name]) for name in ("alpha", "beta")))
    for (alpha, beta), nodes in forms.items():
        yield Found(
            nodes[0].label,
            f"alpha {alpha:.6g}, beta {beta:.6g} at {counted(len(nodes), 'HardSigmoid node')}; the NPU has only "
            "1/6 and 0.5, so these run on the CPU: train with 1/6 and 0.5",
        )


@_rule("clip-range", "note")
def _clip_range(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    fused = absorbed(graph)

    def left(node: Node) -> bool:
        source = graph.producer.get(node.inputs[0])
        before = source and rule_of(graph, source)
        return bool(before and before.absorbs and graph.sole_reader(node.inputs[0])) and node.inputs[0] not in fused

    by_bounds = grouped(filter(left, _nodes(graph, config, "Clip")), lambda n: _limits(graph, n))
    for bounds, nodes in by_bounds.items() if config.fuse_activations else ():
        if bounds is not None:
            yield Found(
                nodes[0].label,
                f"Clip({bounds[0]:.6g}, {bounds[1]:.6g}) at {counted(len(nodes), 'node')} after a Conv or similar layer; only "
                "(0, 6) and (0, 1), as inputs, and Relu are fused with it, so here both tensors are rounded to 8 bits; whole in "
                "the config leaves the clipping to rounding where possible",
            )


@_rule("keeps-whole", "note")
def _keeps_whole(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    wanted = () if config.whole is None or config.strict_quark else made_of(config)
    chosen = selected(graph, config.replace(op_types=None))
    for name in (n for n in wanted if n in KEEPS_WHOLE):
        made = STRUCTURE[name](graph, lambda node: node.outputs[0] in chosen)
        kept = set(made.nodes)
        if replaced := [n for n in graph.nodes if n not in kept] if made is not graph else []:
            ops, more = (
                listed(dict.fromkeys(n.op_type for n in replaced)),
                _multiplications(made) - _multiplications(graph),
            )
            cost = f", at {more / max(1, _multiplications(graph)):.2%} more multiplications" if more > 0 else ""
            text = f"{name} changes {counted(len(replaced), 'node')} ({ops}), as whole={config.whole:g} requests; it is exact"
            yield Found(replaced[0].label, text + cost)
        graph = made


@_rule("pool-size")
def _pool_size(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    for (op, window), nodes in _windows(graph, config).items():
        what, count = _pools(op, window, nodes), math.prod(window)
        splits = op == "GlobalAveragePool" and "split_large_pool" in config.rewrites and len(window) == 2
        if splits and split_kernel(window[0], window[1]) is not None:
            text = "more than 512 elements, so it is split into two pools and rounded twice: pool earlier in the model"
            yield Found(nodes[0].label, f"{what}: {text}", "note")
        elif op != "ReduceMean" and is_too_large(window):
            text = f"{count} elements; the NPU takes up to 512, in sides up to 255: pool in two steps"
            yield Found(nodes[0].label, f"{what}: {text}")


@_rule("pool-factor")
def _pool_factor(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    for (op, window), nodes in _windows(graph, config).items():
        if op != "ReduceMean" and is_too_large(window):
            continue  # `pool-size` has said so
        count = math.prod(window)
        multipliers = [reciprocal(d) for d in window] if op == "ReduceMean" else [pool_multiplier(window)]
        error = math.prod(m / 2**s for m, s in multipliers) * count - 1
        if abs(error) > 1e-9:
            fraction = " * ".join(f"{m}/{2**s}" for m, s in multipliers)
            yield Found(
                nodes[0].label,
                f"{_pools(op, window, nodes)}: the NPU multiplies by {fraction} instead of 1/{count}, "
                f"{_percent(error, '+')} off{'' if len(set(window)) == 1 else ', which vendor tools do not simulate'}: "
                "a side that is a power of two is exact",
                "note" if abs(error) < _LARGE else None,
            )


def _windows(graph: Graph, config: QuantConfig) -> dict[tuple[str, tuple[int, ...]], list[Node]]:
    """Means, grouped by operator and by the size that they average over, where that is known."""
    nodes = _nodes(graph, config, "AveragePool", "GlobalAveragePool", "ReduceMean")
    groups = grouped(nodes, lambda n: (n.op_type, _mean_window(graph, n)))
    return {key: nodes for key, nodes in groups.items() if key[1]}


def _pools(op: str, window: Sequence[int], nodes: Sequence[Node]) -> str:
    return f"{counted(len(nodes), f'{op} node')} over {'x'.join(map(str, window))}"


@_rule("pooled-output", "note")
def _pooled_output(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    chosen = selected(graph, config) if "align_pool" in config.constraints else ()
    kept = None if config.strict_quark else config.output_ties
    for pooled in pooled_outputs(graph):
        if pooled.nodes[0].outputs[0] in chosen:
            exclude = f"exclude={json.dumps([n.label for n in pooled.nodes])}"
            advice = f"leave it in float: {exclude}"
            if kept is not None:
                advice = f"it stays in float if they do in more than {kept:.1%} of the samples; the same by {exclude}"
            yield Found(
                pooled.nodes[0].label,
                f"output {pooled.output!r} comes from an average pool, which keeps the step of its input on the NPU: the "
                f"two largest values often get the same code; {advice}",
                "warning" if kept is None else None,
            )


@_rule("padded-average-pool")
def _padded_average(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    pools = [
        n
        for n in _nodes(graph, config, "AveragePool")
        if not attributes(graph, n).get("count_include_pad", 0) and _overhangs(graph, n)
    ]
    if pools:
        windows = listed(sorted({"x".join(map(str, attributes(graph, n)["kernel_shape"])) for n in pools}))
        yield Found(
            pools[0].label,
            f"{counted(len(pools), 'AveragePool node')} ({windows}) whose windows overhang the border with "
            "count_include_pad=0; the NPU divides by the whole window, so values at the border are too small (in a 3x3 "
            "corner, 4/9 of the right value): export with count_include_pad=1, or leave the node in float",
        )


def _nodes(graph: Graph, config: QuantConfig, *ops: str) -> Iterator[Node]:
    """The nodes of these operators that are quantized, if the format is the one whose NPU arithmetic is known."""
    if vendor_format(config) == "XINT8":
        chosen = selected(graph, config)
        yield from (n for n in graph.nodes if n.op_type in ops and not n.domain and n.outputs[0] in chosen)


def _multiplications(graph: Graph) -> int:
    """The multiply-accumulates of the nodes whose shapes are known."""
    total = 0
    for node in filter(multiplies, graph.nodes):
        shapes = [getattr(graph.values.get(n), "shape", None) or () for n in (*node.inputs, node.outputs[0])]
        if all(isinstance(d, int) for shape in shapes for d in shape) and shapes[-1]:
            total += macs(node, shapes[:-1], shapes[-1]) or 0
    return total


def _percent(ratio: float, sign: str = "") -> str:
    return f"{ratio:{sign}.2%}"


def _shape_arithmetic(graph: Graph) -> set[Node]:
    """Nodes that compute on shapes alone: with a fixed batch they fold away, and `dynamic-batch` says so."""
    known = set(graph.arrays)
    on_shapes = set()
    for node in graph.nodes:
        if node.op_type in ("Shape", "Size") or all(r in known for r in node.reads()):
            on_shapes.add(node)
            known.update(node.outputs)
    return on_shapes


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


def _mean_window(graph: Graph, node: Node) -> tuple[int, ...]:
    """The sizes that an average is over; empty where they are not known."""
    if node.op_type == "AveragePool":
        window: Sequence[Any] = attributes(graph, node).get("kernel_shape", ())
    else:
        shape = _shape(graph, node.inputs[0])
        axes: Iterable[int] = range(2, len(shape))
        if node.op_type == "ReduceMean":
            given = reduced_axes(graph, node) or ()
            axes = sorted({a % len(shape) for a in given if -len(shape) <= a < len(shape)})
        window = [shape[a] for a in axes]
    return tuple(window) if all(isinstance(d, int) and d > 0 for d in window) else ()


def _overhangs(graph: Graph, node: Node) -> bool:
    """Whether some windows of a pool reach over the border; of an image of unknown size, whether all of them fit."""
    attrs = attributes(graph, node)
    kernel, dilations = attrs.get("kernel_shape", ()), attrs.get("dilations")
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations or (1,) * len(kernel), strict=True)]
    known = _shape(graph, node.inputs[0])[2:] or reach
    if len(known) != len(reach):
        return False  # not a valid pool: evaluating it raises the error
    sizes = [size if isinstance(size, int) else least for size, least in zip(known, reach, strict=True)]
    from jq.ops.convolutions import windows  # the op table is not loaded with the package

    stated = (attrs.get("strides"), dilations, attrs.get("pads"), attrs.get("auto_pad", "NOTSET"))
    *_, pads = windows(sizes, kernel, *stated, attrs.get("ceil_mode", 0))
    return any(high > 0 or low > 0 for low, high in pads)
