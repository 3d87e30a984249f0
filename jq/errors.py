"""Every failure that a user can cause, by kind.

An error says where it happened (node, tensor, file), what was found, what was expected and what to
do. Anything else that escapes from `jq` is a defect of `jq`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST = 480  # characters; the words of a command line that reports it come on top
_LONGEST_NAME = 200  # that is looked for: difflib's time grows with the square


class Error(Exception):
    """Base of all errors that `jq` raises on purpose. The message is one line, whatever names it contains."""

    def __str__(self) -> str:
        return shortened(super().__str__(), _LONGEST)


class ModelError(Error):
    """The model file or graph is malformed, or asks for something impossible."""


class DataError(Error):
    """Calibration or evaluation data do not fit the model, or hold NaN or Inf."""


class ConfigError(Error):
    """An option does not exist or its value is not allowed."""


class UnsupportedOp(Error):  # noqa: N818  a name users rely on
    """The model uses operators for which `jq` has no rule; all of them are listed."""


def shortened(text: str, longest: int) -> str:
    """Return a text as one line, without its middle if it is longer: errors end with what to do.

    >>> shortened("found\\n" + 50 * "x" + " expected y", 30)
    'found xxxxxxxxx ... expected y'
    """
    line = " ".join(text.split()) if not text.isprintable() else text
    line = line if line.isprintable() else "".join(c if c.isprintable() else "?" for c in line)
    if len(line) <= longest:
        return line
    tail = (longest - 5) * 2 // 5
    return f"{line[: longest - 5 - tail]} ... {line[len(line) - tail :].lstrip()}"


def suggest(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the nearest known name, whatever its case, or an empty string.

    >>> suggest("XINT", ["XINT8", "A8W8"])
    " Did you mean 'XINT8'?"
    """
    if len(name) > _LONGEST_NAME:
        return ""
    by_letters = {word.lower(): word for word in known if len(word) <= _LONGEST_NAME}
    near = difflib.get_close_matches(name.lower(), by_letters, n=1)
    return f" Did you mean {by_letters[near[0]]!r}?" if near else ""


def check_choice(option: str, value: object, known: Iterable[str]) -> None:
    """Raise a ConfigError if the value of an option is none of the known names.

    >>> check_choice("loss", "mae", ("kl", "mse"))
    Traceback (most recent call last):
    jq.errors.ConfigError: loss needs one of kl, mse; got 'mae'. Did you mean 'mse'?
    """
    names = tuple(known)
    if value not in names:
        raise ConfigError(f"{option} needs one of {', '.join(names)}; got {value!r}.{suggest(str(value), names)}")
