"""Rules of `lint` for models on which the NPU's provider aborts, or which it refuses, instead of leaving nodes to the CPU.

Each rule is a row of `ABORTS` with the public thread where it was measured. Most concern the provider's compiler for float
models. A session that aborts ends the whole program, so no caller can catch it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from jq.config import QuantConfig
from jq.errors import check_choice
from jq.evidence.lint_rules import Finding, Found, Rule, Severity, counted, listed
from jq.graph import Graph, Node
from jq.graph.quantizers import is_pair, is_quantize
from jq.npu.facts import CHIPS
from jq.npu.units import codes_of
from jq.ops.kinds import branches, is_cast, is_conv, is_layer, is_lstm, is_resize
from jq.ops.padding import Padding, padding

_CONV_ATTRIBUTES = ("strides", "pads", "dilations", "kernel_shape", "group")
_VAIP = "zmaychek84/vaip, vaip_pass_to_xir_ops"


class Seen(NamedTuple):
    """A node or tensor that would cause an abort, with a detail for the finding."""

    where: str
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class Abort:
    """An abort or a refusal: the nodes or tensors that cause it, where it was seen, and what to do instead."""

    rule: str
    what: str
    finds: Callable[[Graph], Iterable[Seen]]
    does: str
    source: str
    instead: str
    severity: Severity = "warning"
    loaded: bool = True  # look at the graph as loaded; otherwise at the one that is quantized

    def check(self, graph: Graph, config: QuantConfig) -> Iterator[Found]:
        """Yield one finding at the first of them, with their number."""
        if seen := list(self.finds(graph)):
            first, text = seen[0], f"{self.does} ({self.source}): {self.instead}"
            yield Found(first.where, f"{counted(len(seen), self.what)}{first.detail}; {text}")


# --- Which nodes or tensors ---


def _nodes(kind: Callable[[Node], bool]) -> Callable[[Graph], Iterator[Seen]]:
    """The nodes of a kind, in subgraphs too."""
    return lambda graph: (Seen(n.label) for n in graph.walk() if kind(n))


def _weights_as_inputs(graph: Graph) -> Iterator[Seen]:
    inputs = {v.name for v in graph.inputs}

    def source(name: str) -> str:
        producer = graph.producer.get(name)
        while producer is not None and (is_pair(producer) or is_cast(producer)):
            name = producer.inputs[0]
            producer = graph.producer.get(name)
        return name

    for node in (n for n in graph.nodes if is_layer(n) and len(n.inputs) > 1):
        data, weight = (source(name) for name in node.inputs[:2])
        if weight in inputs and (data not in inputs or is_conv(node)):  # a product of two inputs has no weight
            yield Seen(node.label, f" with a weight that is an input of the graph ({weight})")


def _bfloat16(graph: Graph) -> Iterator[Seen]:
    typed = [v for v in (*graph.inputs, *graph.outputs, *graph.declared.values()) if v.dtype is not None]
    names = [v.name for v in typed if v.dtype is not None and v.dtype.name == "bfloat16"]
    names = list(dict.fromkeys([*names, *(k for k, a in graph.params.items() if a.dtype.name == "bfloat16")]))
    yield from (Seen(name, f" of bfloat16 ({listed(names)})") for name in names)


def _interpolating(graph: Graph) -> Iterator[Seen]:
    modes = ((n, n.attrs.get("mode", "nearest")) for n in graph.nodes if is_resize(n))
    yield from (Seen(n.label, f" of mode {mode}") for n, mode in modes if mode != "nearest")


def _odd(graph: Graph) -> Iterator[Seen]:
    for node in filter(is_resize, graph.nodes):
        shape = getattr(graph.values.get(node.inputs[0]), "shape", None) or ()
        if any(isinstance(d, int) and d > 1 and d % 2 for d in shape[2:] or shape[1:]):
            yield Seen(node.label, " of an image with an odd side")


def _pads(kind: Callable[[Padding], bool], detail: str) -> Callable[[Graph], Iterator[Seen]]:
    """The Pads of a kind, in subgraphs too."""

    def finds(graph: Graph) -> Iterator[Seen]:
        pads = ((n, padding(graph, n)) for n in graph.walk())
        yield from (Seen(n.label, detail) for n, pad in pads if pad is not None and kind(pad))

    return finds


def _alone(graph: Graph) -> Iterator[Seen]:
    computing = [n for n in graph.nodes if not is_pair(n)]
    if len(computing) == 1:
        yield Seen(computing[0].label, f" alone, {computing[0].qualified}")


def _short_of_attributes(graph: Graph) -> Iterator[Seen]:
    if not any(is_quantize(n) for n in graph.nodes):
        return  # `export` writes them out
    for node in filter(is_conv, graph.nodes):
        missing = [a for a in _CONV_ATTRIBUTES if a not in node.attrs]
        if missing and not ("pads" in missing and node.attrs.get("auto_pad")):
            yield Seen(node.label, f" without {', '.join(missing)}")


ABORTS = (
    Abort(
        "provider-if", "If node", _nodes(branches),
        "the provider aborts on an If with tensors whose shapes depend on data, and on one that contains the whole model",
        "onnxsim/onnxsim#1432, amd/RyzenAI-SW#394", "split the model there, or export without it",
    ),
    Abort(
        "provider-weight-input", "layer", _weights_as_inputs,
        "the provider aborts on weights that are not initializers", "onnxsim/onnxsim#1432", "make it an initializer",
    ),
    Abort(
        "provider-lstm", "LSTM node", _nodes(is_lstm),
        "a session with one was measured to crash, though BF16 lists it", "onnxsim/onnxsim#1404",
        "cut the model there, and run it on the CPU",
    ),
    Abort(
        "provider-bfloat16", "tensor", _bfloat16, "the provider refuses such models", "onnxsim/onnxsim#1404",
        "give it float32, which its compiler converts to BF16 itself",
    ),
    Abort(
        "provider-resize", "Resize node", _interpolating,
        "one was seen to run on the CPU and break the NPU's subgraph; changed to nearest, it left the whole model on the CPU",
        "amd/RyzenAI-SW#318", "check the report; whole in the config turns it into matrix products", loaded=False,
    ),
    Abort(
        "provider-resize", "Resize node", _odd,
        "the compiler was seen to abort on a side of 841 in XINT8 and A8W8", "amd/RyzenAI-SW#393", "pad to an even size",
        "note", loaded=False,
    ),
    Abort(
        "provider-pad", "Pad node", _pads(lambda p: p.mode == "wrap", " of mode wrap"),
        "X1's compiler aborts on it", _VAIP, "write it as a Concat of Slices",
    ),
    Abort(
        "provider-pad", "Pad node",
        _pads(
            lambda p: p.mode == "edge" and max(*p.front, *p.behind) > 1, " that repeats the edge by more than a pixel"
        ),
        "X1's compiler mirrors the image there instead", _VAIP,
        "use Pads of one pixel each, as whole in the config does",
    ),
    Abort(
        "provider-small", "operator", _alone, "the provider leaves such models to the CPU by design",
        "amd/RyzenAI-SW#126, onnxsim/onnxsim#1404", "measure it within a model of layers", "note",
    ),
    Abort(
        "provider-attributes", "Conv node", _short_of_attributes,
        "the provider aborts if one of them is left at its default", "onnxsim/onnxsim#1404",
        "write them out, as `quantize` does",
    ),
)  # fmt: skip
RULES = [Rule(a.rule, a.severity, a.check, a.loaded, decomposed=False) for a in ABORTS]


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
            f"{CHIPS[chip].long} has only backend X1, which takes XINT8: 8 bits and scales that are powers of two "
            "(amd/ryzen-ai-documentation 1.8.0, modelrun.rst); all of this model would run on the CPU: quantize to XINT8"
        )
        yield Finding("provider-x1-scales", "warning", "graph", text)
