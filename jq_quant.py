"""The command `jq-quant`: `jq.cli` behind a door that opens at once, so that signals are understood from the start."""

import os
import signal
from typing import Any

_WORDS = {signal.SIGINT: b"interrupted\n", signal.SIGTERM: b"terminated\n"}


def main() -> None:
    """Run the command line; ctrl-C or SIGTERM while that is imported ends as later ones do.

    The process ends in the handler: an exception would come out of the extension modules that are being initialized as
    some other error, or not at all. Nothing is open yet.
    """
    before = {number: signal.getsignal(number) for number in _WORDS}
    for number, handler in before.items():
        if handler in (signal.default_int_handler, signal.SIG_DFL):  # not where a shell has it ignored
            signal.signal(number, _leave)
    from jq.cli import main as run

    for number, handler in before.items():
        signal.signal(number, handler)
    run()


def _leave(number: int, frame: Any) -> None:
    os.write(2, _WORDS[signal.Signals(number)])
    os._exit(128 + number)
