"""Sound files of every kind that `jq` reads, small, to be damaged."""

from __future__ import annotations

import io
import json
import tempfile
import warnings
from pathlib import Path

import numpy as np
import onnx
from onnx.backend.test.loader import load_model_tests

from experiments.robustness.stages import tuned_before

NETWORKS = 12  # random ones
SUITE = "suite_"  # the names of onnx's own cases begin so
LARGEST = 1 << 18  # bytes of one of these
DIALECTS = ("XINT8", "A8W8", "A16W8", "BFP16", "INT8_CNN_DEFAULT")


def sources(suite: bool = True) -> dict[str, bytes]:
    """Files by name, made in a process of its own, as that uses JAX."""
    from experiments.common import fresh

    found: dict[str, bytes] = fresh(_made)
    if suite:
        folder = Path(onnx.__file__).parent / "backend/test/data"
        kinds = ("pytorch-converted", "pytorch-operator", "simple")
        paths = sorted(p for kind in kinds for p in folder.glob(f"{kind}/*/model.onnx"))
        found |= {f"{SUITE}{p.parent.name}.onnx": p.read_bytes() for p in paths if p.stat().st_size < LARGEST}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cases = load_model_tests(kind="node")  # which onnx makes, and has no files of
        found |= {f"{SUITE}{c.name}.onnx": c.model.SerializeToString() for c in cases if c.model.ByteSize() < LARGEST}
    return found


def _made() -> dict[str, bytes]:
    warnings.simplefilter("ignore")
    return {**_models(), **_documents(), **_tables(), **_arrays()}


def _models() -> dict[str, bytes]:
    import jq
    from tests.networks import network

    found = {f"{name}.onnx": jq.zoo.path(name).read_bytes() for name in jq.zoo.models()}
    for seed in range(NETWORKS):
        case = network(seed, 8)
        found[f"random{seed}.onnx"] = case.model.SerializeToString()
        dialect = DIALECTS[seed % len(DIALECTS)]
        for form in ("qdq", "qoperator") if dialect in ("A8W8", "INT8_CNN_DEFAULT") else ("qdq",):
            try:
                made = jq.quantize(case.model, case.data, jq.presets[dialect], format=form)
            except jq.Error:
                continue
            found[f"random{seed}_{dialect}_{form}.onnx"] = made.model.SerializeToString()
    return found


def _documents() -> dict[str, bytes]:
    import jq
    from jq.config_file import as_toml
    from jq.data.preprocessing import PREPROCESSINGS

    experiment = 'models = ["fashion_resnet"]\nsamples = 8\nseeds = [0, 1]\n[configs.a]\npreset = "XINT8"\n'
    experiment += "[grid]\nfinetune_steps = [5]\n"
    report = {
        "deviceStat": [{"name": "NPU", "nodeNum": 2, "supportedOpType": ["::Conv"]}],
        "nodeStat": [{"input": ["x"], "output": ["y"], "opType": "Conv", "device": "NPU"}],
        "subgraphStat": [{"device": "NPU", "count": 4}],
    }
    images, labels = (a[:2] for a in jq.zoo.evaluation_set())
    made = jq.npu.device_report(jq.zoo.path("fashion_resnet"), images, reading="cpu", labels=labels, with_inputs=True)
    boxes = {
        "images": [{"id": i, "file_name": f"{i}.png", "height": 10, "width": 20} for i in (1, 2)],
        "categories": [{"id": 3, "name": "cat"}, {"id": 5, "name": "dog"}],
        "annotations": [{"image_id": i, "category_id": 3, "bbox": [1, 2, 3.5, 4], "iscrowd": i - 1} for i in (1, 2)],
    }
    return {
        "boxes.json": json.dumps(boxes).encode(),
        "config.toml": as_toml(jq.presets["XINT8"].replace(overrides={"stem*": {"symmetric": True}})).encode(),
        "config.json": json.dumps(jq.presets["A8W8"].to_dict()).encode(),
        "experiment.toml": experiment.encode(),
        "prep.toml": PREPROCESSINGS["imagenet"].to_toml().encode(),
        "report.json": json.dumps(report).encode(),
        "device.json": json.dumps(made.to_dict()).encode(),
    }


def _tables() -> dict[str, bytes]:
    from jq.research.ablation import COLUMNS
    from jq.research.ledger import Ledger

    values = {str: "a,b", int: 3}
    row = {name: values.get(kind, 0.5) if isinstance(kind, type) else 0.5 for name, kind in COLUMNS.items()}
    found = {"labels.csv": b"image,label\ncat.png,3\ndog.png,7\n", "labels.txt": b"1\n2\n3\n"}
    with tempfile.TemporaryDirectory() as folder:
        for suffix in (".csv", ".jsonl"):
            ledger = Ledger.open(f"{folder}/ledger{suffix}", COLUMNS)
            for name in ("one", "two\nlines"):
                ledger.append({**row, "config": name})
            found[f"ledger{suffix}"] = Path(f"{folder}/ledger{suffix}").read_bytes()
    score = {"value": 20.0, "low": 18.5, "high": None, "samples": 16, "error": 0.1, "holds": True}
    search = {"hash": "a", "rung": "XINT8", "config": "{}", "score": score, "facts": [1.0, 0.5, 0, 1000, ""]}
    search |= {"seconds": 0.5, "outcome": "kept"}
    return {**found, "search.jsonl": json.dumps(search).encode() + b"\n"}


def _arrays() -> dict[str, bytes]:
    import jq

    images = jq.zoo.calibration_set()[0][:4]
    plain, packed = io.BytesIO(), io.BytesIO()
    np.save(plain, images)
    np.savez_compressed(packed, input=images, labels=np.arange(4))
    found = {"data.npy": plain.getvalue(), "data.npz": packed.getvalue()}
    with tempfile.TemporaryDirectory() as folder:
        graph = jq.prepare(jq.load(jq.zoo.path("fashion_resnet")), "XINT8")
        jq.calibrate(graph, images, "XINT8").save(f"{folder}/stats.safetensors")
        found["stats.safetensors"] = Path(f"{folder}/stats.safetensors").read_bytes()
        progress = tuned_before(Path(f"{folder}/checkpoint.safetensors"))
        for unit, name in enumerate(("stem.weight", "logits.weight")):
            progress.keep(0, unit, {name: graph.params[name]}, {})
        found["checkpoint.safetensors"] = Path(f"{folder}/checkpoint.safetensors").read_bytes()
    try:
        import PIL.Image
    except ImportError:
        return found
    for suffix in (".png", ".jpg", ".bmp", ".gif", ".tif", ".webp", ".ppm"):
        picture = io.BytesIO()
        PIL.Image.fromarray(np.uint8(255 * np.clip(images[0, 0], 0, 1))).save(
            picture, PIL.Image.registered_extensions()[suffix]
        )
        found[f"image{suffix}"] = picture.getvalue()
    return found
