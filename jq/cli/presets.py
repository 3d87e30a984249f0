"""`jq-quant presets`: the configs by name, each with what it is, where it runs and what it costs."""

from __future__ import annotations

from typing import Annotated

import typer

import jq
from jq.arithmetic.formats import Block, Float
from jq.cli.application import command
from jq.cli.show import answer, table
from jq.config import QuantConfig

_STAGES = {
    None: "calibration, seconds",
    "adaround": "finetunes layers, a minute",
    "adaquant": "finetunes layers, a minute",
    "adaround+exponents": "finetunes layers, then searches exponents, some minutes",
}


@command()
def presets(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List the presets, with the chip and the cost of each.

    Example: jq-quant presets

    Example: jq-quant quantize --config XINT8 --show-config
    """
    rows = [(name, sentence(config), chip(config), cost(config)) for name, config in jq.presets.items()]
    columns = ("preset", "description", "chip", "cost on a MobileNet")
    document = [dict(zip(("preset", "what", "chip", "cost"), row, strict=True)) for row in rows]
    answer(as_json, document, table(columns, rows))


def sentence(config: QuantConfig) -> str:
    """Return what a config does to a network, in a sentence.

    >>> sentence(jq.presets["XINT8"])
    'uint8 activations, int8 weights, power-of-two scales, equalized'
    """
    if config.dynamic:
        return f"{config.weight} weights; activations {config.activation}, scaled while the model runs"
    if isinstance(config.activation, (Float, Block)):
        kind = "blocks with one exponent each" if isinstance(config.activation, Block) else "a shorter float"
        parts = [f"{config.activation}: {kind}"]
    else:
        scales = "power-of-two scales" if config.scale == "power_of_two" else "float scales"
        zeros = "" if config.symmetric and config.weight_symmetric else ", zero points"
        parts = [f"{config.activation} activations, {config.weight} weights, {scales}{zeros}"]
        parts += ["one scale per channel"] if config.per_channel else []
        parts += [f"{config.end_bits} bits at both ends"] if config.end_bits else []
        parts += ["equalized"] if config.cle else []
    parts += [f"finetuned by {config.finetune}"] if config.finetune else []
    return ", ".join(parts)


def chip(config: QuantConfig) -> str:
    """Return where a config's models run, as the vendor's documentation of its formats says."""
    if config.dynamic:
        return "CPU"
    if isinstance(config.activation, Block):
        return "NPU (stx, krk) for BFP16; the others are simulated"
    if isinstance(config.activation, Float):
        return "NPU (stx, krk) for BF16" if config.activation.name.startswith("bf") else "CPU, GPU"
    if config.scale == "power_of_two":
        narrow = min(config.activation.bits, getattr(config.weight, "bits", 8)) < 8
        return "none: for research" if narrow else "NPU (phx, hpt, stx, krk)" if config.constraints else "DPU"
    return "NPU (stx, krk), CPU" if config.activation.bits >= 8 else "CPU"


def cost(config: QuantConfig) -> str:
    """Return what a config takes beside reading the data."""
    if not config.calibrates:
        return "no calibration" if config.finetune is None else _STAGES.get(config.finetune, "finetunes")
    return _STAGES.get(config.finetune, "finetunes")
