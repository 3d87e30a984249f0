"""Advice about the layers that make most of the outputs' error: sentences, with commands to copy."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

from jq.arithmetic.formats import Integer
from jq.config import QuantConfig, presets
from jq.data.preprocessing import Preprocessing
from jq.evidence.origins import PARTS, Attribution, LayerShare
from jq.graph import Graph

_NAMED = 5  # nodes that a command names
_TUNED = ("_ADAROUND", "_ADAQUANT", "_ACCURATE")  # endings of presets that finetune, the costlier ones later
_CHIPS = "on Strix and Krackan; Phoenix takes only XINT8"

Advice = tuple[tuple[str, str], ...]


def advised(
    made: Attribution, graph: Graph, preset: str, model: str, data: str, pixels: Preprocessing | None = None
) -> Advice:
    """Return what may be done about the leading layers of a float graph: a sentence and a command for each, the likeliest first.

    The model was quantized by the preset, or by a tool whose scales are like the preset's.
    """
    leading = [layer for layer in made.leading() if layer.op != "input"]  # an input is no node
    if not leading:
        return ()
    words = ["jq-quant", "quantize", model, "--data", data, *(pixels.options() if pixels is not None else ())]
    quantize = f"{shlex.join(words)} --config"
    nodes = _nodes(leading, graph)
    causes = {part: sum(layer.effects.get(part, 0.0) for layer in leading) for part in PARTS}
    ranked = [part for part in sorted(causes, key=lambda part: -causes[part]) if causes[part] > 0]
    chosen = dict[str, str]()  # sentences by their commands: two causes may have one remedy
    for part in ranked:
        for sentence, command in _remedies(part, leading, nodes, preset):
            chosen.setdefault(f"{quantize} {command}", sentence)
    if nodes:
        excluded = " ".join(f"--exclude {shlex.quote(name)}" for name in nodes)
        chosen.setdefault(f"{quantize} {preset} {excluded}", "leave the worst layers in float")
    return tuple((sentence, command) for command, sentence in chosen.items())


def _nodes(leading: Sequence[LayerShare], graph: Graph) -> list[str]:
    """The float model's nodes of the worst layers: a layer that a rewrite made has those that make its tensors."""
    known, names = {node.label for node in graph.nodes}, dict[str, None]()
    for layer in leading[:_NAMED]:
        made = [graph.producer[t].label for t in layer.tensors if t in graph.producer]
        names |= dict.fromkeys([layer.name] if layer.name in known else made)
    return list(names)


def _remedies(part: str, leading: Sequence[LayerShare], nodes: Sequence[str], preset: str) -> Iterator[tuple[str, str]]:
    """Yield sentences and what stands behind --config for them."""
    config = presets[preset]
    short = isinstance(config.activation, Integer) and config.activation.bits <= 8
    tuned = _next_finetuning(preset, config)
    if part in ("weights", "rounding") and tuned is not None:
        yield "finetune, so that layers reproduce their float outputs", tuned
    if part in ("rounding", "constraint") and config.scale == "power_of_two":
        yield f"use float scales, which are finer and have no constraints ({_CHIPS})", "A8W8"
    if part == "rounding" and config.scale == "float" and short and nodes:
        wider = " ".join(f"--override {shlex.quote(name)} activation=int16" for name in nodes)
        yield f"give the worst activations 16 bits ({_CHIPS})", f"{preset} {wider}"
    if part == "form" and any(layer.op == "HardSigmoid" and layer.cause == "form" for layer in leading):
        yield "keep each Sigmoid, which then runs on the CPU in XINT8", f"{preset} --set form_loss=0"


def _next_finetuning(preset: str, config: QuantConfig) -> str | None:
    """The preset that finetunes more than this one, if there is one."""
    plain = next((preset.removesuffix(end) for end in _TUNED if preset.endswith(end)), preset)
    done: Mapping[str, int] = {plain + end: i + 1 for i, end in enumerate(_TUNED)}
    costlier = [name for name, rank in done.items() if rank > done.get(preset, 0) and name in presets]
    return next(iter(costlier), None) if config.finetune is None or preset in done else None
