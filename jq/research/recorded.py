"""Rows of the ledger of `jq.auto`: what a rung made, without the model, from which an interrupted search resumes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from jq.config import QuantConfig
from jq.errors import DataError
from jq.research.judging import Score
from jq.research.ledger import Column, Ledger
from jq.research.rungs import Candidate

COLUMNS: Mapping[str, Column] = {
    "hash": str, "rung": str, "config": str, "score": (dict, type(None)), "facts": (list, type(None)),
    "seconds": (int, float), "outcome": str,
}  # fmt: skip


def rows_of(book: Ledger, identity: str) -> dict[str, Mapping[str, Any]]:
    """The rows of this search by their hash; those of others are left alone."""
    return {row["hash"]: row for row in book.rows if row["hash"].startswith(identity)}


def row_of(key: str, rung: str, config: QuantConfig, c: Candidate | None, outcome: str, took: float) -> dict[str, Any]:
    """The row of a rung: its candidate, if it made one, and what came of it."""
    score = None if c is None else dataclasses.asdict(c.score)
    facts = None if c is None else [c.cost, c.narrow, c.islands, c.size, c.forecast]
    return {
        "hash": key, "rung": rung, "config": json.dumps(config.to_dict()), "score": score, "facts": facts,
        "seconds": took, "outcome": outcome,
    }  # fmt: skip


def read_row(row: Mapping[str, Any], rung: str, config: QuantConfig) -> Candidate | None:
    """The candidate of a row, whose model is made again if it is chosen; None where there was none."""
    if row["score"] is None:
        return None
    try:
        known = Score(**row["score"])
        ends = {k: None if (v := getattr(known, k)) is None else float(v) for k in ("low", "high")}
        samples = None if known.samples is None else int(known.samples)
        score = Score(float(known.value), **ends, samples=samples, error=float(known.error), holds=known.holds is True)
        cost, narrow, count, size, places = row["facts"]
        return Candidate(rung, config, score, float(cost), float(narrow), int(count), int(size), str(places), None)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise DataError(f"the ledger's row of {rung!r} is damaged: {error}; give the name of a new file") from error
