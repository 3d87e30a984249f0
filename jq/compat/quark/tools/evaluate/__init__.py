"""Quark's evaluate tool under its path: `jq-quant evaluate` with all of its options.

python -m jq.compat.quark.tools.evaluate --baseline_results_folder float/ --quantized_results_folder quantized/
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jq import cli


def main(argv: Sequence[str] | None = None) -> None:
    """Run `jq-quant evaluate` and raise SystemExit with its code.

    >>> main(["--help"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    SystemExit: ...
    """
    cli.main(["evaluate", *(sys.argv[1:] if argv is None else argv)])
