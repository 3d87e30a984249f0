"""`jq-quant demo`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

import jq
from jq.cli.application import command
from jq.cli.options import use_all_cores
from jq.cli.show import answer, table

_DEMO_BATCH, _DEMO_IMAGES = 250, 256
_MEASURES = {
    "float_top1": ("float top-1", "{:.2%}".format),
    "xint8_top1": ("XINT8 top-1", "{:.2%}".format),
    "simulated_top1": ("XINT8 top-1, simulated by jq", "{:.2%}".format),
    "same_class": ("same class, simulated and onnxruntime", "{:.2%}".format),
    "float_bytes": ("float model", "{:,} bytes".format),
    "xint8_bytes": ("XINT8 model", "{:,} bytes".format),
    "seconds": ("quantized in", "{:.1f} s".format),
}


@command(writes=("folder",))
def demo(
    folder: Annotated[Path, typer.Option("--output", "-o", help="The folder for models and reports.")] = Path(
        "jq-demo"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Quantize the bundled models, and compare them with the float ones.

    Example: jq-quant demo -o jq-demo/
    """
    use_all_cores()
    names = jq.zoo.models()
    columns = [_demo(name, folder) for name in names]
    rows = [(words, *(shown(c[measure]) for c in columns)) for measure, (words, shown) in _MEASURES.items()]
    model = folder / f"{names[-1]}_xint8.onnx"
    answer(
        as_json,
        {"folder": str(folder), "models": dict(zip(names, columns, strict=True))},
        table(("", *names), rows, "XINT8 on the bundled Fashion-MNIST images"),
        *(f"written: {folder / f'{name}_xint8'}.onnx, .html" for name in names),
        "Next:",
        f"  open {folder / f'{names[-1]}_xint8.html'} in a browser to see what each tensor lost",
        f"  jq-quant inspect {model}",
        "  jq-quant lint YOUR_MODEL.onnx",
        "  jq-quant quantize YOUR_MODEL.onnx --data YOUR_IMAGES/ --report report.html",
    )


def _demo(name: str, folder: Path) -> dict[str, float]:
    """One model quantized: its accuracy by onnxruntime, and by jq's fake-quant."""
    import jax
    import onnxruntime

    images, labels = jq.zoo.evaluation_set()
    path, output = jq.zoo.path(name), folder / f"{name}_xint8.onnx"
    start = time.perf_counter()
    result = jq.quantize(path, jq.zoo.calibration_set()[0][:_DEMO_IMAGES], "XINT8", output=output)
    seconds = time.perf_counter() - start
    result.report.to_html(output.with_suffix(".html"))

    def accuracy(guess: np.ndarray) -> float:
        return float(np.mean(guess == labels))

    def by_onnxruntime(file: str | os.PathLike[str]) -> np.ndarray:
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        batches = (images[i : i + _DEMO_BATCH] for i in range(0, len(images), _DEMO_BATCH))
        return np.concatenate([session.run(None, {"input": batch})[0] for batch in batches]).argmax(-1)

    qfn = jq.fake_quant(result.graph)
    forward = jax.jit(jq.chunked(lambda params, inputs: qfn(params, result.plan, inputs)))
    simulated = np.asarray(forward(jq.pack(result.graph), {"input": images})["logits"]).argmax(-1)
    quantized = by_onnxruntime(output)
    return {
        "float_top1": accuracy(by_onnxruntime(path)),
        "xint8_top1": accuracy(quantized),
        "simulated_top1": accuracy(simulated),
        "same_class": float(np.mean(simulated == quantized)),
        "float_bytes": path.stat().st_size,
        "xint8_bytes": output.stat().st_size,
        "seconds": seconds,
    }
