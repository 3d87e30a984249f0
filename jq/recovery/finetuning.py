"""Accuracy recovery: weights, biases and scales tuned on calibration data, so that the quantized network does what the
float one does.

`walk` goes through a network unit by unit (`units`) with what both networks make of the data (`streams`). At each,
a method tunes it: `layers` by the quadratic form of a layer's error (`gram`), with `adaround` or `adaquant`;
`reconstruct` by gradient, for blocks and for the whole network.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jq.arithmetic.formats import INT32
from jq.config import QuantConfig, resolve
from jq.data.sources import batches, open_source, readable_again
from jq.errors import ConfigError, DataError
from jq.graph import Graph
from jq.npu.constraints import moving_together, violations
from jq.plan import Plan, QParams
from jq.plan.planning import with_product_scales
from jq.recovery.adaquant import AdaQuant
from jq.recovery.adaround import AdaRound
from jq.recovery.checkpoint import Change, Progress
from jq.recovery.layers import Rounding, can_round, nearest, tune_layer
from jq.recovery.parts import Kind, Unit, bias_of, units
from jq.recovery.reconstruction import Reconstruction, fisher, tune_unit
from jq.recovery.streams import CHUNK_BYTES, Store
from jq.recovery.walk import Record, Site, Tune, rehearsed, walk
from jq.util.progress import unit_bar


def finetune(
    graph: Graph,
    plan: Plan,
    data: Any,
    config: QuantConfig | str = "XINT8_ADAROUND",
    *,
    params: Mapping[str, Any] | None = None,
    time_budget: float | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    spill: str | os.PathLike[str] | None = None,
    rounding: Rounding | None = None,
) -> tuple[dict[str, Any], Plan]:
    """Return params and a plan with which the graph, quantized, is nearer to what it computes in floats.

    `config.finetune` names the stages. Tuning starts from `params`, by default the graph's own, which are the float
    network's in any case. After `time_budget` seconds what is left stays as it is. With `checkpoint`, a run that was
    stopped goes on from that file when it is started again, and ends with the same bytes. Activations are kept in
    memory, or in files in the folder `spill`. A `rounding` of your own does what AdaRound or AdaQuant would
    (docs/guides/your_own.md).

    >>> import jq
    >>> graph = jq.prepare(jq.load(jq.zoo.path("fashion_mobilenet")), "XINT8")
    >>> images, _ = jq.zoo.calibration_set()
    >>> plan = jq.make_plan(graph, jq.calibrate(graph, images[:32]))
    >>> params, plan = jq.finetune(graph, plan, images[:32], "XINT8_ADAROUND")
    >>> params.keys() == graph.params.keys()
    True
    """
    config, start = resolve(config), time.perf_counter()
    check_tunable(config, plan)
    data = readable_again(data, graph.inputs, config.seed)
    params = dict(graph.params) | dict(params or {})
    with contextlib.ExitStack() as stack:
        folder = None
        if spill is not None:
            os.makedirs(spill, exist_ok=True)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=spill)))
        saved = Progress.open(checkpoint, graph, plan, params, data, config, rounding)
        store = store_of(graph, plan, data, config, folder)
        stages = str(config.finetune).split("+")
        parts = [units(graph, plan, KINDS[stage]) for stage in stages]
        total = sum(bool(u.layers) for group in parts for u in group)
        report = stack.enter_context(unit_bar("finetune", total))
        for number, group in enumerate(parts):

            def done(
                i: int, arrays: dict[str, Any], scales: dict[str, QParams], record: Record, number: int = number
            ) -> bool:
                saved.keep(number, i, arrays, scales)
                report(record.unit, record.before, record.after)
                return time_budget is None or time.perf_counter() - start < time_budget

            if time_budget is not None and time.perf_counter() - start >= time_budget:
                break
            given = (graph, params, plan, group, store, config, number, rounding)
            params, plan = tune_stage(*given, skip=saved.done(number), done=done)
    if time_budget is None or time.perf_counter() - start < time_budget:  # else more can be tuned from it
        saved.forget()
    return params, rescaled(graph, plan)


def check_tunable(config: QuantConfig, plan: Plan) -> None:
    """Raise a ConfigError where there is no stage, or nothing that could be tuned."""
    if not config.finetune:
        raise ConfigError(
            "config.finetune names no stage; take a preset such as XINT8_ADAROUND, or replace(finetune=...)"
        )
    if config.strict_quark:
        raise ConfigError("strict_quark has no finetuning: Quark's is not repeated bit by bit; take strict_quark=False")
    if any(q.dynamic for q in plan.activations.values()):
        raise ConfigError(
            "activations with dynamic scales are not fixed before the model runs: there is nothing to tune"
        )


def tune_stage(
    graph: Graph,
    params: dict[str, Any],
    plan: Plan,
    group: list[Unit],
    store: Store,
    config: QuantConfig,
    number: int,
    rounding: Rounding | None = None,
    *,
    skip: Mapping[int, Change] | None = None,
    done: Callable[[int, dict[str, Any], dict[str, QParams], Record], bool] = lambda *_: True,
) -> tuple[dict[str, Any], Plan]:
    """Return params and plan after one of the config's stages, by its number, in which the units of a group are tuned."""
    stage = str(config.finetune).split("+")[number]
    tune = _method(stage, graph, plan, config, group, store, number, rounding)
    given, skip = (graph, params, plan, group, store, tune), skip or {}
    with rehearsed(*given, skip=skip) as passed:

        def counted(*found: Any) -> bool:
            passed()
            return done(*found)

        return walk(*given, skip=skip, done=counted)


def draws(stage: str, group: list[Unit], plan: Plan) -> bool:
    """Whether what a stage makes of a group's units hangs on the seed: only gradients are of samples."""
    linear = all(can_round(unit, unit.plan(plan)) for unit in group if unit.layers)
    return KINDS[stage] != "layer" or (stage == "adaquant" and not linear)


KINDS: dict[str, Kind] = {
    "bias": "layer", "adaround": "layer", "adaquant": "layer", "block": "block", "network": "network"
}  # fmt: skip


def _method(
    stage: str, graph: Graph, plan: Plan, config: QuantConfig, parts: list[Unit], store: Store, number: int,
    rounding: Rounding | None,
) -> Tune:  # fmt: skip
    """How each unit is tuned in a stage."""
    key = jax.random.fold_in(jax.random.key(config.seed), number)
    steps, rate = config.finetune_steps, config.finetune_rate
    given: dict[str, Any] = {k: v for k, v in {"steps": steps, "weights": rate}.items() if v is not None}
    drop, at_once = config.finetune_drop or None if stage == "block" else None, 2 if stage == "network" else None
    how = Reconstruction(batch=config.finetune_batch, drop=drop, at_once=at_once, **given)
    free: list[tuple[str, ...]] = []
    counts: dict[str, Any] = {}
    if stage in ("block", "network"):
        free = _free(graph, plan, config)
        counts = fisher(graph, parts, {k: chunks[0] for k, chunks in store.inputs.items()}, key)

    def reconstruct(site: Site) -> tuple[Site, float, float]:
        importance = site.unit.inside({t: counts[t] for t in site.unit.outputs if t in counts})
        inside = site.plan.activations.keys()
        named = [tuple(site.unit.names.get(t, "") for t in group) for group in free]
        standing = len(violations(graph, site.network, config))

        def allowed(moved: Site) -> bool:
            whole = site.network.replace(site.unit.outside(dict(moved.plan.activations)))
            return len(violations(graph, whole, config)) <= standing

        groups = [group for group in named if inside >= set(group)]
        return tune_unit(site, how, groups, allowed, importance, jax.random.fold_in(key, site.index))

    if stage in ("block", "network"):
        return reconstruct
    given = {k: v for k, v in {"steps": steps, "learning_rate": rate}.items() if v is not None}
    how_to_round: Rounding = nearest if stage == "bias" else rounding or _ROUNDINGS[stage](**given)

    def tune(site: Site) -> tuple[Site, float, float]:
        if can_round(site.unit, site.plan):
            return tune_layer(site, how_to_round)
        return reconstruct(site) if stage == "adaquant" else (site, float("nan"), float("nan"))

    return tune


_ROUNDINGS: dict[str, Callable[..., Rounding]] = {"adaround": AdaRound, "adaquant": AdaQuant}


def rescaled(graph: Graph, plan: Plan) -> Plan:
    """The plan with biases in 32 bits at the scales of the products that they are added to now."""
    nodes = {b: n for n in graph.nodes if (b := bias_of(graph, n)) in plan.weights and plan[str(b)].grid == INT32}
    return with_product_scales(plan, {str(b): n for b, n in nodes.items()})


def _free(graph: Graph, plan: Plan, config: QuantConfig) -> list[tuple[str, ...]]:
    """The activations whose scales are powers of two that may change, those together that must be alike."""
    groups = moving_together(graph, plan, config)
    alike = [group for group in groups if len({float(plan[t].scale) for t in group}) == 1]
    return [group for group in alike if all(t in plan.activations for t in group)]


def store_of(graph: Graph, plan: Plan, data: Any, config: QuantConfig, folder: Path | None) -> Store:
    """All of the data, in chunks that fit the caches."""
    source = open_source(data, graph.inputs, seed=config.seed)
    feed = {k: a.shape for k, a in source.head.items()}
    largest = max(u.feed_bytes for u in units(graph, plan, "layer"))
    count = source.length or 64
    size = max(1, min(count, CHUNK_BYTES // max(1, largest)))
    size = -(-count // -(-count // size))
    found = list(batches(source, size))
    if not found:
        raise DataError("the data are empty: finetuning needs some samples")
    for batch in found:
        if {k: a.shape[1:] for k, a in batch.inputs.items()} != feed:
            raise DataError("finetuning needs samples of one shape")
    return Store({k: [b.inputs[k] for b in found] for k in feed}, [b.valid for b in found], folder)
