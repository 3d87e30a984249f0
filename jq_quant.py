"""The command `jq-quant`: `jq.cli` behind a door that opens at once, so that ctrl-C is understood from the start."""

import os
import signal
from typing import Any


def main() -> None:
    """Run the command line; an interrupt while that is imported ends as later ones do.

    The process ends in the handler: an exception would come out of the extension modules that are being initialized as
    some other error, or not at all. Nothing is open yet.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not where a shell has it ignored
        signal.signal(signal.SIGINT, _leave)
    from jq.cli import main as run

    signal.signal(signal.SIGINT, before)
    run()


def _leave(number: int, frame: Any) -> None:
    os.write(2, b"interrupted\n")
    os._exit(128 + number)
