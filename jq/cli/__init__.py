"""The command line: `python -m jq`, or `jq-quant`.

Commands lie in files by what they work on. Each imports `jq` inside its function, so that `--help` is quick, and prints
only when its work is done, so that a failure leaves standard output empty.
"""

import importlib
import pkgutil

from jq.cli.application import app, main
from jq.cli.show import printable

for _module in pkgutil.iter_modules(__path__):  # each registers its commands
    importlib.import_module(f"{__name__}.{_module.name}")
app.registered_commands.sort(key=lambda command: getattr(command.callback, "__name__", ""))

__all__ = ["app", "main", "printable"]
