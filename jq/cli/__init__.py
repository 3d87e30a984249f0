"""The command line: `python -m jq`, or `jq-quant`.

A command is one file here. It imports what `jq` itself does not, so that `--help` is quick, and prints when its work
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
    inspect,
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
    "inspect",
    "lint",
    "main",
    "preprocess",
    "printable",
    "quantize",
    "sensitivity",
    "simulate",
]
