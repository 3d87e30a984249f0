"""Rules of `lint` on what the NPU's provider aborts on, or refuses as a whole, instead of leaving it to the CPU.

Each names the public thread where it was measured. Most are of the provider's compiler for float models; a session that
aborts takes the program with it, so it cannot be caught.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from jq.config import QuantConfig
from jq.errors import check_choice
from jq.evidence.lint_rules import Finding, Found, Rule, at_first, counted, listed, rule
from jq.graph import Graph, Node
from jq.graph.quantizers import is_pair, is_quantize
from jq.npu.facts import CHIPS
from jq.npu.units import codes_of
from jq.ops.kinds import branches, is_cast, is_conv, is_layer, is_lstm, is_resize
from jq.ops.padding import padding

RULES: list[Rule] = []
_rule = functools.partial(rule, RULES)
_CONV_ATTRIBUTES = ("strides", "pads", "dilations", "kernel_shape", "group")


@_rule("provider-if", loaded=True)
def _if(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    yield from at_first(
        [n for n in graph.walk() if branches(n)],
        "If node",
        "; the provider aborts on an If whose tensors have shapes that data decide, and on one that holds the whole model "
        "(onnxsim/onnxsim#1432, amd/RyzenAI-SW#394): split the model there, or export without it",
    )


@_rule("provider-weight-input", loaded=True)
def _weight_input(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    inputs = {v.name for v in graph.inputs}

    def source(name: str) -> str:
        producer = graph.producer.get(name)
        while producer is not None and (is_pair(producer) or is_cast(producer)):
            name = producer.inputs[0]
            producer = graph.producer.get(name)
        return name

    nodes = [n for n in graph.nodes if is_layer(n) and len(n.inputs) > 1 and source(n.inputs[1]) in inputs]
    both = [n for n in nodes if source(n.inputs[0]) in inputs]  # a product of two inputs has no weight
    nodes = [n for n in nodes if n not in both or is_conv(n)]
    weight = source(nodes[0].inputs[1]) if nodes else ""
    yield from at_first(
        nodes,
        "layer",
        f" with a weight that is an input of the graph ({weight}); the provider aborts on weights that are not stored "
        "(onnxsim/onnxsim#1432): make it an initializer",
    )


@_rule("provider-lstm", loaded=True)
def _lstm(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    yield from at_first(
        [n for n in graph.walk() if is_lstm(n)],
        "LSTM node",
        "; a session with one was measured to crash, though BF16 lists it (onnxsim/onnxsim#1404): cut the model there, and run "
        "it on the CPU",
    )


@_rule("provider-bfloat16", loaded=True)
def _bfloat16(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    typed = [v for v in (*graph.inputs, *graph.outputs, *graph.declared.values()) if v.dtype is not None]
    names = [v.name for v in typed if v.dtype is not None and v.dtype.name == "bfloat16"]
    names += [k for k, a in graph.params.items() if a.dtype.name == "bfloat16"]
    if names:
        yield Found(
            names[0],
            f"bfloat16 in {counted(len(set(names)), 'tensor')} ({listed(dict.fromkeys(names))}); the provider refuses such "
            "models (onnxsim/onnxsim#1404): give it float32, of which its compiler makes BF16 itself",
        )


@_rule("provider-resize", "note")
def _resize(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    nodes = [n for n in graph.nodes if is_resize(n)]
    smooth = [n for n in nodes if n.attrs.get("mode", "nearest") != "nearest"]
    mode = smooth[0].attrs["mode"] if smooth else ""
    yield from at_first(
        smooth,
        "Resize node",
        f" of mode {mode}; one was seen on the CPU, with a break of the NPU's subgraph, and a whole model on the CPU after it "
        "was made nearest (amd/RyzenAI-SW#318): look at the report; whole in the config makes matrix products of it",
        "warning",
    )
    yield from at_first(
        [n for n in nodes if _has_an_odd_side(graph, n)],
        "Resize node",
        " of an image with an odd side; the compiler was seen to abort on a side of 841 in XINT8 and A8W8 "
        "(amd/RyzenAI-SW#393): pad to an even size",
    )


def _has_an_odd_side(graph: Graph, node: Node) -> bool:
    shape = getattr(graph.values.get(node.inputs[0]), "shape", None) or ()
    return any(isinstance(d, int) and d > 1 and d % 2 for d in shape[2:] or shape[1:])


@_rule("provider-pad", loaded=True)
def _pad(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    pads = [(n, p) for n in graph.walk() if (p := padding(graph, n)) is not None]
    yield from at_first(
        [n for n, p in pads if p.mode == "wrap"],
        "Pad node",
        " of mode wrap; X1's compiler aborts on it (zmaychek84/vaip, vaip_pass_to_xir_ops): write it as a Concat of Slices",
    )
    yield from at_first(
        [n for n, p in pads if p.mode == "edge" and max(*p.front, *p.behind) > 1],
        "Pad node",
        " to repeat the edge by more than a pixel; X1's compiler mirrors the image there instead (zmaychek84/vaip, "
        "vaip_pass_to_xir_ops): Pads of one pixel each, which whole in the config makes, are right",
    )


@_rule("provider-small", "note", loaded=True)
def _small(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    computing = [n for n in graph.nodes if not is_pair(n)]
    if len(computing) == 1:
        yield Found(
            computing[0].label,
            f"{computing[0].qualified} is the only operator; the provider leaves such models to the CPU by design "
            "(amd/RyzenAI-SW#126, onnxsim/onnxsim#1404): measure it within a model of layers",
        )


@_rule("provider-attributes", loaded=True)
def _attributes(graph: Graph, config: QuantConfig) -> Iterator[Found]:
    if not any(is_quantize(n) for n in graph.nodes):
        return  # `export` writes them out
    short = [(n, [a for a in _CONV_ATTRIBUTES if a not in n.attrs]) for n in graph.nodes if is_conv(n)]
    short = [(n, missing) for n, missing in short if missing and not ("pads" in missing and n.attrs.get("auto_pad"))]
    missing = short[0][1] if short else []
    yield from at_first(
        [node for node, _ in short],
        "Conv node",
        f" without {', '.join(missing)}; the provider aborts where one of them is left to its default "
        "(onnxsim/onnxsim#1404): write them out, as `quantize` does",
    )


def of_chip(graph: Graph, config: QuantConfig, chip: str) -> Iterator[Finding]:
    """Findings that depend on the chip: a batch, and formats that it does not take."""
    check_choice("chip", chip, CHIPS)
    for value in graph.inputs:
        batch = value.shape[0] if value.shape and len(value.shape) == 4 else 1
        if isinstance(batch, int) and batch > 1:
            text = f"a batch of {batch}; the NPU takes images one by one (amd/RyzenAI-SW#309): export with a batch of 1"
            yield Finding("provider-batch", "warning", value.name, text)
    quantizers = [codes_of(graph, n) for n in graph.nodes if is_quantize(n) and n.inputs[0] not in graph.arrays]
    floats = sum(not c.power_of_two for c in quantizers) if quantizers else config.scale == "float"
    wide = any(c.bits > 8 for c in quantizers)
    if (floats or wide) and "X2" not in CHIPS[chip].backends:
        text = (
            f"{CHIPS[chip].long} has backend X1 alone, which takes XINT8: 8 bits and scales that are powers of two "
            "(amd/ryzen-ai-documentation 1.8.0, modelrun.rst); all of this model would run on the CPU: quantize to XINT8"
        )
        yield Finding("provider-x1-scales", "warning", "graph", text)
