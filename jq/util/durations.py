"""Times as users write them."""

from __future__ import annotations

from jq.errors import ConfigError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def seconds_of(time: float | str | None) -> float | None:
    """Return a time such as 90, "90s", "2m" or "1h" in seconds.

    >>> seconds_of("2m"), seconds_of(90)
    (120.0, 90.0)
    """
    if time is None:
        return None
    text = str(time)
    unit = _UNITS.get(text[-1:])
    try:
        number = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ConfigError(f"expected a time such as 120s, 2m or 1h; got {time!r}")
    return number
