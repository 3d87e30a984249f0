"""README's commands on models of one's own show what its table says: on the bundled ones always, on real ones at hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "experiments" / "tutorial" / "readme.py"
# A folder with the models, JQ_ZOO/mobilenetv2.onnx and so on, images to calibrate (.npz) and labelled JPEGs.
PLACES = ("JQ_ZOO", "JQ_CALIBRATION", "JQ_IMAGES")
ROWS = {
    "mobilenetv2": "MobileNetV2",
    "efficientnet_lite0": "EfficientNet-Lite0",
    "resnet50": "ResNet-50",
    "mobilenet_v1": "MobileNetV1",
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    root = str(SCRIPT.parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )


def test_bundled_models() -> None:
    done = run()
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.count("(README ") == 4  # float and XINT8 of two models


@pytest.mark.slow
@pytest.mark.skipif(not all(map(os.environ.get, PLACES)), reason=f"real models are named by {', '.join(PLACES)}")
@pytest.mark.parametrize("model", ROWS)
def test_real_models(model: str) -> None:
    zoo, calibration, images = (os.environ[place] for place in PLACES)
    path = Path(zoo) / f"{model}.onnx"
    if not path.exists():
        pytest.skip(f"no {path.name} among the real models")
    done = run(f"{path}:{ROWS[model]}", "--calibration", calibration, "--images", images)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
