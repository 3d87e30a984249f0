"""The command line: `python -m jq`, or `jq-quant`.

Each command is one file. It imports `jq` inside its function, so that `--help` is quick, and prints only when its work
is done, so that a failure leaves standard output empty.
"""

from jq.cli import (
    ablate,
    calibrate,
    compare,
    convert,
    demo,
    evaluate,
    infer,
    inspection,
    lint,
    preprocess,
    quantize,
    sensitivity,
    simulate,
)
from jq.cli.application import app, main
from jq.cli.show import printable

__all__ = [
    "ablate",
    "app",
    "calibrate",
    "compare",
    "convert",
    "demo",
    "evaluate",
    "infer",
    "inspection",
    "lint",
    "main",
    "preprocess",
    "printable",
    "quantize",
    "sensitivity",
    "simulate",
]
