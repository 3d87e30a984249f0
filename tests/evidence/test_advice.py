"""Advice: its commands can be copied, and are of use to the model that was compared."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest

import jq
from jq.cli import main
from jq.cli.pixels import preprocessing
from jq.data.preprocessing import PREPROCESSINGS, Pixels, Preprocessing
from jq.evidence.advice import advised
from jq.evidence.origins import PARTS, Attribution, LayerShare

PATH = jq.zoo.path("fashion_mobilenet")
GRAPH = jq.load(PATH)


def shares(*layers: tuple[str, str, str, float], tensors: tuple[str, ...] = ()) -> Attribution:
    """An attribution to layers by name, operator, part and share."""
    made = (LayerShare(n, op, tensors or (n,), dict.fromkeys(PARTS, 0.0) | {part: s}) for n, op, part, s in layers)
    return Attribution(tuple(made), 16)


def commands(made: Attribution, preset: str, pixels: Preprocessing | None = None) -> list[str]:
    return [command for _, command in advised(made, GRAPH, preset, "m.onnx", "photos", pixels)]


CONV = next(node for node in GRAPH.nodes if node.op_type == "Conv")


@pytest.mark.parametrize(
    ("part", "preset", "first"),
    [
        ("weights", "XINT8", "XINT8_ADAROUND"), ("weights", "XINT8_ADAROUND", "XINT8_ADAQUANT"),
        ("weights", "XINT8_ADAQUANT", "XINT8_ACCURATE"), ("weights", "S8S8_AAWS", "S8S8_AAWS_ADAROUND"),
        ("weights", "BF16", "BF16_ADAQUANT"), ("weights", "A8W8_ADAQUANT", f"A8W8_ADAQUANT --exclude {CONV.label}"),
        ("rounding", "XINT8", "XINT8_ADAROUND"), ("rounding", "XINT8_ACCURATE", "A8W8"),
        ("rounding", "A8W8_ADAQUANT", f"A8W8_ADAQUANT --override {CONV.label} activation=int16"),
        ("constraint", "XINT8", "A8W8"), ("form", "XINT8", f"XINT8 --exclude {CONV.label}"),
    ],
)  # fmt: skip
def test_the_first_remedy_is_for_the_cause_and_goes_further(part: str, preset: str, first: str) -> None:
    chosen = commands(shares((CONV.label, "Conv", part, 1.0)), preset)
    assert chosen[0] == f"jq-quant quantize m.onnx --data photos --config {first}"
    assert len(set(chosen)) == len(chosen)


def test_hard_sigmoids_are_avoided_and_inputs_are_no_nodes() -> None:
    made = shares(("h", "HardSigmoid", "form", 0.6), ("input", "input", "rounding", 0.4), tensors=CONV.outputs)
    chosen = commands(made, "XINT8")
    assert any(c.endswith("--set form_loss=0") for c in chosen)
    assert chosen[-1].endswith(f"--exclude {CONV.label}")  # which makes the tensor of the layer that a rewrite made
    assert commands(shares(("input", "input", "rounding", 1.0)), "XINT8") == []


@pytest.mark.parametrize("pixels", [PREPROCESSINGS["imagenet"], Preprocessing(mean=0.5, std=(0.25,), resize=(30, 40))])
def test_the_preprocessing_is_part_of_the_command(pixels: Preprocessing) -> None:
    words = shlex.split(commands(shares((CONV.label, "Conv", "weights", 1.0)), "XINT8", pixels)[0])
    options = words[words.index("photos") + 1 : words.index("--config")]
    given = {name.removeprefix("--"): value for name, value in zip(options[::2], options[1::2], strict=True)}
    assert preprocessing(given) == pixels


@pytest.mark.filterwarnings("ignore:.*bytes are taken as pixels")
@pytest.mark.parametrize("preset", ["XINT8", "A8W8"])
def test_each_command_is_taken(preset: str, tmp_path: Path) -> None:
    images = jq.zoo.calibration_set()[0][:8]
    pixels = Preprocessing(mean=0.286, std=0.353)
    place = tmp_path / "images.npy"
    np.save(place, pixels.undo(images.transpose(0, 2, 3, 1)))
    jq.quantize(PATH, Pixels(place, pixels), preset, output=tmp_path / "q.onnx")
    report = jq.compare(PATH, tmp_path / "q.onnx", place)
    assert report.advice
    for _, command in report.advice:
        assert f"--data {place} --mean 0.286 --std 0.353 --config" in command
        whole = "--exclude" in command  # names of nodes are looked up only then
        options = ["-q", "-o", str(tmp_path / "o.onnx")] if whole else ["--show-config"]
        with pytest.raises(SystemExit) as caught:
            main([*shlex.split(command)[1:], *options])
        assert not caught.value.code, command
