"""Damage: a file's bytes, protobuf fields or text changed at random, by a seed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import ModelProto

Rng = np.random.Generator
Mutation = Callable[[bytes, Rng], bytes]

_ODD = (0, -1, 1, 2, 255, 256, 1 << 16, 1 << 24, (1 << 31) - 1, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63), -(1 << 62))
_WORDS = (
    "",
    "x",
    "y",
    "\x1b[31m",
    "a\nb",
    "é日",
    "../x",
    "ai.onnx",
    "com.microsoft",
    "Relu",
    "Identity",
    "N" * 2000,
    "\u2028",
)
_TOKENS = (
    b"", b"null", b"NaN", b"-1", b"1e999", b"99999999999999999999", b'"', b"'", b"[", b"]", b"{", b"}", b"[[[[[[[[[[", b"\n", b"\r",
    b",", b"=", b".", b"a.b.c", b"#", b"\x00", b"\xff", b"\xe2\x80\xa8", b"true", b'"\\ud800"', b"XINT8", b"0x10", b"1979-05-27",
)  # fmt: skip

_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2.5, 1e308, float("nan"), float("inf"), -float("inf"), 1 << 31, 1 << 63, 1 << 200, "", "x", "0",
    "nan", "1e999", "a\nb", "\u2028", "\ud800", "N" * 2000, "../x", [], {}, [[]], [None], [1, "x"], {"x": 1}, {"": []}, [0] * 100,
)  # fmt: skip


def flip_bits(data: bytes, rng: Rng) -> bytes:
    """1 to 16 bits, one time in two among the first kilobyte, where headers lie."""
    damaged = np.frombuffer(data, np.uint8).copy()
    end = min(len(data), 1024) if rng.random() < 0.5 else len(data)
    for place in rng.integers(max(end, 1), size=2 ** int(rng.integers(5))):
        if len(damaged):
            damaged[place] ^= np.uint8(1 << rng.integers(8))
    return damaged.tobytes()


def truncate(data: bytes, rng: Rng) -> bytes:
    """Any length, often close to the whole."""
    return data[: int(len(data) * (1 - rng.random() ** 4))]


def splice(data: bytes, rng: Rng) -> bytes:
    """A part of the file once more in another place."""
    a, b, c = (int(p) for p in rng.integers(len(data) + 1, size=3))
    a, b = sorted((a, b))
    return data[:c] + data[a : min(b, a + 4096)] + data[c:]


def edit_tokens(data: bytes, rng: Rng) -> bytes:
    """One to four odd words in place of characters, or between them."""
    for _ in range(int(rng.integers(1, 5))):
        place, cut = int(rng.integers(len(data) + 1)), int(rng.integers(0, 4))
        data = data[:place] + _TOKENS[rng.integers(len(_TOKENS))] + data[place + cut :]
    return data


def swap_lines(data: bytes, rng: Rng) -> bytes:
    """A line twice, away, or in another place."""
    lines = data.split(b"\n")
    a, b = (int(p) for p in rng.integers(len(lines), size=2))
    line = lines[a] if rng.random() < 0.5 else lines.pop(a)
    if rng.random() < 0.7:
        lines.insert(b, line)
    return b"\n".join(lines)


def edit_values(data: bytes, rng: Rng) -> bytes:
    """One to three values of a document (JSON, a line of JSON, TOML) in place of others: odd ones, of any kind."""
    for _ in range(int(rng.integers(1, 4))):
        odd = _VALUES[rng.integers(len(_VALUES))]
        try:
            data = json.dumps(_with_value(json.loads(data), odd, rng)).encode()
            continue
        except (ValueError, RecursionError):  # several documents, or another form
            lines = data.split(b"\n")
        index = int(rng.integers(len(lines)))
        name, equals, _ = lines[index].partition(b"=")
        if equals:
            lines[index] = name + b"= " + json.dumps(odd).replace("null", "nan").encode()
        else:
            with contextlib.suppress(ValueError, RecursionError):
                lines[index] = json.dumps(_with_value(json.loads(lines[index]), odd, rng)).encode()
        data = b"\n".join(lines)
    return data


def _with_value(document: Any, odd: Any, rng: Rng) -> Any:
    """A document with one of its values, at any depth, in place of which stands another; or without it."""
    if not isinstance(document, (dict, list)) or not document or rng.random() < 0.1:
        return odd
    keys = list(document) if isinstance(document, dict) else range(len(document))
    key = keys[int(rng.integers(len(keys)))]
    if rng.random() < 0.1:
        del document[key]
    elif isinstance(document, list) and rng.random() < 0.1:
        document.append(document[key])
    else:
        document[key] = _with_value(document[key], odd, rng)
    return document


def edit_fields(data: bytes, rng: Rng) -> bytes:
    """One to three fields of a model: numbers, names, types, parts taken away, doubled, exchanged or put elsewhere."""
    model = ModelProto.FromString(data)
    for _ in range(int(rng.integers(1, 4))):
        slots = [(message, field) for message in _messages(model) for field, _ in message.ListFields()]
        if not slots:
            break
        message, field = slots[rng.integers(len(slots))]
        try:
            _edit_field(model, message, field, rng)
        except (ValueError, TypeError, OverflowError):  # protobuf does not hold that
            continue
    return model.SerializeToString()


def _messages(message: Any) -> list[Any]:
    found = [message]
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for inner in value if _repeated(field) else [value]:
            found += _messages(inner)
    return found


def _repeated(field: Any) -> bool:
    return field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED


def _edit_field(model: ModelProto, message: Any, field: Any, rng: Rng) -> None:
    value, action = getattr(message, field.name), rng.integers(6)
    if not _repeated(field):
        if action == 0:
            message.ClearField(field.name)
        elif field.message_type is None:
            setattr(message, field.name, _other(value, model, rng))
        else:
            _put_another(model, value, rng)
        return
    index = int(rng.integers(len(value)))
    if action == 0:
        del value[index]
    elif action == 1:
        message.ClearField(field.name)
    elif action == 2 and field.message_type is None:
        value.append(value[index])
    elif action == 2:
        value.add().CopyFrom(value[index])
    elif field.message_type is None:
        value[index] = _other(value[index], model, rng)
    else:
        _put_another(model, value[index], rng)


def _put_another(model: ModelProto, message: Any, rng: Rng) -> None:
    """Another part of the model of the same kind; copied first, as it may hold the place it is put in."""
    alike = [m for m in _messages(model) if type(m) is type(message)]
    copy = type(message)()
    copy.CopyFrom(alike[rng.integers(len(alike))])
    message.CopyFrom(copy)


def _other(value: Any, model: ModelProto, rng: Rng) -> Any:
    if isinstance(value, str):
        names = [n for node in model.graph.node for n in (node.op_type, *node.input, *node.output)] or [""]
        return names[rng.integers(len(names))] if rng.random() < 0.7 else _WORDS[rng.integers(len(_WORDS))]
    if isinstance(value, bytes):
        return (flip_bits, truncate, splice)[rng.integers(3)](value, rng)
    if isinstance(value, float):
        return float(rng.choice([0.0, -1.0, np.nan, np.inf, 1e-45, 3e38, value * 2]))
    number = int(value)
    near = (number + 1, number - 1, number * 2, -number, int(rng.integers(1, 30)))
    return int((*near, *near, *_ODD)[rng.integers(len(near) * 2 + len(_ODD))])


BYTES: dict[str, Mutation] = {"bits": flip_bits, "length": truncate, "splice": splice}
TEXT: dict[str, Mutation] = {**BYTES, "tokens": edit_tokens, "lines": swap_lines, "values": edit_values}
MODEL: dict[str, Mutation] = {"bits": flip_bits, "length": truncate, "fields": edit_fields}
WEIGHTS = {"bits": 1, "length": 1, "splice": 2, "tokens": 6, "lines": 3, "values": 12, "fields": 12}
