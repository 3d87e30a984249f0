"""Random valid options, one to four on a preset, on random networks: quantized, or refused in one line.

    python experiments/robustness/configs.py --seconds 170 [--seed 0] [--only 17]

Options and their values follow from the declarations of `QuantConfig`; what it refuses at once is drawn again. Each config is
taken from the float network to a model, and onnxruntime runs that, unless it has operators of the vendor's. An exception other
than a `jq.Error` is a defect, and so are a model that onnxruntime refuses, outputs that are not finite, and a long message.
Appends a JSON line to `--out`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import sys
import time
import types
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np

from experiments.common import RESULTS
from experiments.robustness.isolation import isolated, judged, own_cache
from experiments.robustness.stages import imported

SECONDS = 120  # what is compiled here is no measure of time
SIZE = 6  # operators of a network
FORMATS = (*["qdq"] * 4, *["qoperator"] * 2, "vitis_qdq", "fix_neuron")
OWN = {"", "ai.onnx", "com.microsoft"}  # domains that onnxruntime has as it comes
_QUICK = {"finetune_steps": 5, "batch": 2, "finetune_batch": 2}  # where an option does not say otherwise


def value_of(kind: Any, own: Any, rng: np.random.Generator) -> Any:
    """A value that a declared option may hold."""
    from jq.arithmetic.formats import BLOCKS, FLOATS, INTEGERS

    origin, parts = get_origin(kind), get_args(kind)
    if own.valid is not None and "format" in own.needs:
        known = [*INTEGERS.values(), *FLOATS.values(), *BLOCKS.values()]
        return known[rng.integers(len(known))]
    if origin in (Union, types.UnionType):
        return value_of(parts[rng.integers(len(parts))], own, rng)
    if origin is Literal:
        return parts[rng.integers(len(parts))]
    if origin is tuple:
        return tuple(name for name in own.among if rng.random() < 0.5)
    if kind is bool:
        return bool(rng.random() < 0.5)
    if kind in (int, float):
        low, high = max(own.least, own.above, -100.0), min(own.most, 100.0)
        drawn = rng.uniform(low, high) if rng.random() < 0.7 else (low, high)[rng.integers(2)]
        return kind(drawn)
    if kind is str and own.among:
        return "+".join(rng.choice(list(own.among), size=int(rng.integers(1, 3))))
    return None


def drawn(seed: int, index: int) -> tuple[str, dict[str, Any], int, str]:
    """A preset, options, the seed of a network, and a format of export; of nothing but seed and index."""
    import jq
    from jq.util.fields import declared

    rng = np.random.default_rng((seed, index))
    names = [name for name in declared(jq.QuantConfig) if name not in ("overrides", "exclude_subgraphs")]
    while True:
        preset, options = list(jq.presets)[rng.integers(len(jq.presets))], dict[str, Any]()
        for name in rng.choice(names, size=int(rng.integers(1, 5)), replace=False):
            kind, own = declared(jq.QuantConfig)[str(name)]
            options[str(name)] = value_of(kind, own, rng)
        with contextlib.suppress(jq.ConfigError):
            jq.presets[preset].replace(**options)
            return preset, options, int(rng.integers(1 << 20)), FORMATS[rng.integers(len(FORMATS))]


def attempt(preset: str, options: dict[str, Any], network_seed: int, form: str) -> object:
    import jq
    from tests.flow import session_of
    from tests.networks import network

    case = network(network_seed, SIZE)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        config = jq.presets[preset].replace(**{**_QUICK, **options})
        made = jq.quantize(case.model, case.data, config, format=form).model
        if {n.domain for n in made.graph.node} <= OWN:
            outputs = session_of(made, whole=True).run(None, {k: v[:1] for k, v in case.data.items()})
            if not all(np.isfinite(o).all() for o in outputs if o.dtype.kind == "f"):
                raise AssertionError("outputs are not finite")
    return f"{len(made.graph.node)} nodes"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="this case alone, in this process")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "configs.jsonl")
    args = parser.parse_args(arguments)
    imported()
    if args.only is not None:
        case = drawn(args.seed, args.only)
        print(case, judged(functools.partial(attempt, *case)), sep="\n")
        return
    counts, refusals = collections.Counter[str](), collections.Counter[str]()
    defects, start, first = [], time.perf_counter(), 0
    with own_cache():
        while time.perf_counter() - start < args.seconds:
            cases = [drawn(args.seed, first + i) for i in range(20)]
            for index, outcome in isolated([functools.partial(attempt, *case) for case in cases], args.jobs, SECONDS):
                kind, _, text = outcome.text.partition("\t")
                counts["defect" if outcome.defect else kind] += 1
                if outcome.defect:
                    defects.append({"case": first + index, "outcome": outcome.text[:400], "options": str(cases[index])})
                    print(json.dumps(defects[-1]), flush=True)
                elif kind != "ok":
                    refusals[text[:120]] += 1
            first += len(cases)
    print(f"{first} configs of seed {args.seed}: {dict(counts)}")
    for text, count in refusals.most_common(20):
        print(f"{count:4}  {text}")
    line = {"experiment": "configs", "seed": args.seed, "cases": first, "outcomes": dict(counts), "defects": defects}
    with args.out.open("a") as file:
        file.write(json.dumps(line) + "\n")
    sys.exit(bool(defects))


if __name__ == "__main__":
    main()
