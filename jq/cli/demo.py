"""`jq-quant demo`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

import jq
from jq.cli.application import app
from jq.cli.options import use_all_cores
from jq.cli.show import show, table

_DEMO_BATCH, _DEMO_IMAGES = 250, 256


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--output", "-o", help="Where the models and reports go.")] = Path("jq-demo"),
) -> None:
    """Quantize the bundled models for the NPU, and compare them with their float originals."""
    from rich.console import Console
    from rich.progress import track

    use_all_cores()
    names, console = jq.zoo.models(), Console(stderr=True)
    progress = track(names, "quantizing", console=console, transient=True) if console.is_terminal else names
    columns = [_demo(name, folder) for name in progress]
    rows = [(measure, *(c[measure] for c in columns)) for measure in columns[0]]
    model = folder / f"{names[-1]}_xint8.onnx"
    show(
        table(("", *names), rows, "XINT8 on the bundled Fashion-MNIST images"),
        *(f"written: {folder / f'{name}_xint8'}.onnx, .html" for name in names),
        "Next:",
        f"  open {folder / f'{names[-1]}_xint8.html'} in a browser: what each tensor lost",
        f"  jq-quant inspect {model}",
        "  jq-quant lint YOUR_MODEL.onnx",
        "  jq-quant quantize YOUR_MODEL.onnx --data YOUR_IMAGES/ --report report.html",
    )


def _demo(name: str, folder: Path) -> dict[str, str]:
    """One model quantized: its accuracy by onnxruntime, and by jq's fake-quant."""
    import jax
    import numpy as np
    import onnxruntime

    images, labels = jq.zoo.evaluation_set()
    path, output = jq.zoo.path(name), folder / f"{name}_xint8.onnx"
    start = time.perf_counter()
    result = jq.quantize(path, jq.zoo.calibration_set()[0][:_DEMO_IMAGES], "XINT8", output=output)
    seconds = time.perf_counter() - start
    result.report.to_html(output.with_suffix(".html"))

    def accuracy(guess: np.ndarray) -> str:
        return f"{np.mean(guess == labels):.2%}"

    def by_onnxruntime(file: str | os.PathLike[str]) -> np.ndarray:
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        batches = (images[i : i + _DEMO_BATCH] for i in range(0, len(images), _DEMO_BATCH))
        return np.concatenate([session.run(None, {"input": batch})[0] for batch in batches]).argmax(-1)

    qfn = jq.fake_quant(result.graph)
    forward = jax.jit(jq.chunked(lambda params, inputs: qfn(params, result.plan, inputs)))
    simulated = np.asarray(forward(jq.pack(result.graph), {"input": images})["logits"]).argmax(-1)
    quantized = by_onnxruntime(output)
    return {
        "float top-1": accuracy(by_onnxruntime(path)),
        "XINT8 top-1": accuracy(quantized),
        "XINT8 top-1, simulated by jq": accuracy(simulated),
        "same class, simulated and onnxruntime": f"{np.mean(simulated == quantized):.2%}",
        "float model": f"{path.stat().st_size:,} bytes",
        "XINT8 model": f"{output.stat().st_size:,} bytes",
        "quantized in": f"{seconds:.1f} s",
    }
