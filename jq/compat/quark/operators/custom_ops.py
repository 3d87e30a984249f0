"""`quark.onnx.operators.custom_ops`: Quark's compiled operators, which no model of jq's needs."""

from __future__ import annotations

from typing import NoReturn

from jq.errors import ConfigError


def get_library_path(device: str = "CPU") -> NoReturn:
    """Raise a ConfigError: there is no library to register.

    >>> get_library_path("CPU")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    jq.errors.ConfigError: jq has no library of operators for 'CPU'...
    """
    raise ConfigError(
        f"jq has no library of operators for {device!r}; onnxruntime runs the models that jq writes without one: "
        "leave out register_custom_ops_library"
    )
