"""Every failure that a user can cause, by kind.

An error says where it happened (node, tensor, file), what was found, what was expected and what to
do. Anything else that escapes from `jq` is a defect of `jq`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class Error(Exception):
    """Base of every error that `jq` raises on purpose."""


class ModelError(Error):
    """The model file or graph is malformed, or asks for something that cannot be."""


class DataError(Error):
    """Calibration or evaluation data do not fit the model, or hold NaN or Inf."""


class ConfigError(Error):
    """An option does not exist or its value is not allowed."""


class UnsupportedOp(Error):  # noqa: N818  a name users rely on
    """The model uses operators for which `jq` has no rule; all of them are listed."""


def suggest(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the nearest known name, or an empty string.

    >>> suggest("XINT", ["XINT8", "A8W8"])
    " Did you mean 'XINT8'?"
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
