"""Sequences, optionals and strings. Strings are known while tracing: XLA has none."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from jq.errors import ModelError
from jq.graph import Graph
from jq.ops.shape import cut, pieces
from jq.ops.table import Array, Context, namespace, op

# --- Sequences: Python lists of arrays ---


@op("SequenceConstruct", host=True)
def sequence_construct(*xs: Array) -> list[Array]:
    return list(xs)


@op("SequenceEmpty", host=True)
def sequence_empty() -> list[Array]:
    return []


@op("SequenceLength", host=True)
def sequence_length(xs: list[Array]) -> np.ndarray:
    return np.asarray(len(xs), np.int64)


@op("SequenceAt", static=("position",), host=True)
def sequence_at(xs: list[Array], position: np.ndarray) -> Array:
    return xs[int(position.item())]


@op("SequenceInsert", static=("position",), host=True)
def sequence_insert(xs: list[Array], x: Array, position: np.ndarray | None = None) -> list[Array]:
    place = len(xs) if position is None else int(position.item())
    return [*xs[:place], x, *xs[place:]]


@op("SequenceErase", static=("position",), host=True)
def sequence_erase(xs: list[Array], position: np.ndarray | None = None) -> list[Array]:
    place = (-1 if position is None else int(position.item())) % len(xs)
    return xs[:place] + xs[place + 1 :]


@op("ConcatFromSequence", host=True)
def concat_from_sequence(xs: list[Array], *, axis: int, new_axis: int) -> Array:
    xp = namespace(*xs)
    return xp.stack(xs, axis) if new_axis else xp.concatenate(xs, axis)


@op("SplitToSequence", static=("split",), host=True)
def split_to_sequence(x: Array, split: np.ndarray | None = None, *, axis: int, keepdims: int) -> list[Array]:
    size = x.shape[axis]
    if split is not None and split.ndim:
        return pieces(x, split, axis)
    step = 1 if split is None else int(split.item())
    parts = [cut(x, {axis: slice(i, i + step)}) for i in range(0, size, step)]
    return parts if keepdims or split is not None else [p.squeeze(axis) for p in parts]


@op("SequenceMap", host=True)
def sequence_map(xs: list[Array], *others: Any, body: Graph, ctx: Context) -> tuple[list[Array], ...]:
    """The body once per element: elements may differ in shape, so nothing can be rolled into a scan."""
    rows = [ctx.run(body, [x, *(o[i] if isinstance(o, list) else o for o in others)]) for i, x in enumerate(xs)]
    return tuple([row[i] for row in rows] for i in range(ctx.outputs))


# --- Optionals: the element itself, or None ---


@op("Optional", host=True)
def optional(x: Any = None) -> Any:
    return x


@op("OptionalHasElement", host=True)
def optional_has_element(x: Any = None) -> np.ndarray:
    return np.asarray(x is not None)


@op("OptionalGetElement", host=True)
def optional_get_element(x: Any) -> Any:
    if x is None:
        raise ModelError("its optional holds no element; check with OptionalHasElement first")
    return x


# --- Strings: numpy object arrays of str ---


def _each(function: Callable[[Any], Any], x: np.ndarray, dtype: Any) -> np.ndarray:
    """`function` of every element."""
    y = np.empty(x.shape, dtype)
    y.reshape(-1)[:] = [function(v) for v in x.reshape(-1).tolist()]
    return y


@op("StringConcat", static=("x", "y"), host=True)
def string_concat(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.asarray(np.add(x, y, dtype=object), object)


@op("StringSplit", static=("x",), host=True)
def string_split(
    x: np.ndarray, *, delimiter: str | None = None, maxsplit: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    parts = [s.split(delimiter or None, -1 if maxsplit is None else maxsplit) for s in x.reshape(-1).tolist()]
    width = max(map(len, parts), default=0)
    padded = np.asarray([p + [""] * (width - len(p)) for p in parts], object)
    return padded.reshape(*x.shape, width), np.asarray([len(p) for p in parts], np.int64).reshape(x.shape)


@op("RegexFullMatch", static=("x",), host=True)
def regex_full_match(x: np.ndarray, *, pattern: str) -> np.ndarray:
    """ONNX speaks of RE2, whose common syntax Python shares."""
    return _each(lambda s: re.fullmatch(pattern, s) is not None, x, bool)


@op("StringNormalizer", static=("x",), host=True)
def string_normalizer(
    x: np.ndarray, *, case_change_action: str, is_case_sensitive: int, locale: str | None = None, stopwords: Any = None
) -> np.ndarray:
    """Stop words go first; what case they are compared in is `is_case_sensitive`. `locale` has no effect."""
    fold = str.upper if case_change_action == "UPPER" else str.lower
    change = {"UPPER": str.upper, "LOWER": str.lower}.get(case_change_action, str)
    same = str if is_case_sensitive else fold
    stops = {same(w) for w in stopwords or ()}
    kept = [change(w) for w in x.reshape(-1).tolist() if same(w) not in stops] or [""]
    return np.asarray(kept, object).reshape(*x.shape[:-1], len(kept))


@op("LabelEncoder", domain="ai.onnx.ml", static=("x",), host=True)
def label_encoder_classes(
    x: np.ndarray, *, classes_strings: Any, default_int64: int, default_string: str
) -> np.ndarray:
    if x.dtype == object:
        places = {name: i for i, name in enumerate(classes_strings)}
        return _each(lambda v: places.get(v, default_int64), x, np.int64)
    return _each(lambda v: classes_strings[v] if 0 <= v < len(classes_strings) else default_string, x, object)


@op("LabelEncoder", domain="ai.onnx.ml", since=2, static=("x",), host=True)
def label_encoder(
    x: np.ndarray, *, keys_tensor: Any = None, keys_strings: Any = None, keys_int64s: Any = None,
    keys_floats: Any = None, values_tensor: Any = None, values_strings: Any = None, values_int64s: Any = None,
    values_floats: Any = None, default_tensor: Any = None, default_string: str, default_int64: int,
    default_float: float,
) -> np.ndarray:  # fmt: skip
    """NaN is a key like any other."""
    keys = next(k for k in (keys_tensor, keys_strings, keys_int64s, keys_floats) if k is not None)
    choices = (
        (values_tensor, default_tensor, None),
        (values_strings, default_string, object),
        (values_int64s, default_int64, np.int64),
        (values_floats, default_float, np.float32),
    )
    values, default, dtype = next(c for c in choices if c[0] is not None)
    values = np.asarray(values, dtype)
    if default is None:
        default = {"O": "_Unused", "f": -0.0}.get(values.dtype.kind, -1)

    def name(key: Any) -> Any:
        return "nan" if isinstance(key, float) and key != key else key

    table = {name(k): v for k, v in zip(np.ravel(keys).tolist(), values.reshape(-1).tolist(), strict=True)}
    return _each(lambda v: table.get(name(v), np.asarray(default).item()), x, values.dtype)


@op("TfIdfVectorizer", static=("x",), host=True)
def tfidf_vectorizer(
    x: np.ndarray, *, pool_strings: Any = None, pool_int64s: Any = None, ngram_counts: Any, ngram_indexes: Any,
    weights: Any = None, min_gram_length: int, max_gram_length: int, max_skip_count: int, mode: str,
) -> np.ndarray:  # fmt: skip
    """Counts the n-grams of a pool in each row; the items of one may stand up to `max_skip_count` + 1 apart."""
    pool = pool_int64s if pool_strings is None else pool_strings
    ends = (*ngram_counts[1:], len(pool))
    spans = enumerate(zip(ngram_counts, ends, strict=True), 1)
    grams = [pool[i : i + n] for n, (a, b) in spans for i in range(a, b, n)]
    column = dict(zip(grams, ngram_indexes, strict=True))
    counts = np.zeros((*x.shape[:-1], max(ngram_indexes) + 1), np.float32)
    rows, width = x.reshape(-1, x.shape[-1]).tolist(), x.shape[-1]
    for row, count in zip(rows, counts.reshape(len(rows), -1), strict=True):
        for n in range(min_gram_length, max_gram_length + 1):
            for step in range(1, min(max_skip_count + 2, width) if n > 1 else 2):
                for start in range(width - (n - 1) * step):
                    gram = tuple(row[start : start + (n - 1) * step + 1 : step])
                    if gram in column:
                        count[column[gram]] += 1
    counts = np.minimum(counts, 1) if mode == "IDF" else counts
    return counts if mode == "TF" or weights is None else counts * np.asarray(weights, np.float32)
