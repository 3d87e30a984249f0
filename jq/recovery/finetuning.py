"""Accuracy recovery: weights, biases and scales tuned on calibration data, so that the quantized network computes what
the float one does.

`walk` goes through a network unit by unit (`parts`) with the tensors of both networks (`streams`). Each is tuned by a
method: `layers` rounds by the quadratic form of a layer's error, with any `rounding` (`adaround`, `descent`,
`adaquant`); `reconstruction` tunes blocks and the whole network by gradient.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jq.arithmetic.formats import INT16, INT32, Integer
from jq.config import OWN, QuantConfig, resolve
from jq.data.sources import open_source, readable_again
from jq.errors import ConfigError
from jq.graph import Graph
from jq.graph.shapes import of_data
from jq.npu.constraints import moving_together, violations
from jq.ops.linear import bias_of
from jq.plan import Plan, QParams
from jq.plan.planning import with_product_scales
from jq.readings.data_shapes import traceable
from jq.recovery.adaquant import AdaQuant
from jq.recovery.adaround import AdaRound
from jq.recovery.checkpoint import Change, Progress
from jq.recovery.descent import CoordinateDescent
from jq.recovery.exponents.search import searched
from jq.recovery.feedback import GPFQ, GPTQ
from jq.recovery.flexround import FlexRound
from jq.recovery.held_back import HeldBack
from jq.recovery.layers import EXPONENTS, can_round, fit_bias, tune_layer
from jq.recovery.parts import Kind, Unit, units
from jq.recovery.reconstruction import Reconstruction, fisher, tune_unit
from jq.recovery.rounding import Rounding, Then
from jq.recovery.streams import Store
from jq.recovery.walk import Record, Site, Tune, rehearsed, store_of, walk
from jq.util.digest import digest
from jq.util.progress import unit_bar

_TUNED, _KEPT = (
    "tuned ",
    4,
)  # what the keys of tuned params begin with, and how many are kept: each is as large as the network
_SOFT_STEPS = 400  # of weights between two codes: their logits have a sigmoid to travel


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
    roundings: Mapping[str, Rounding] | None = None,
) -> tuple[dict[str, Any], Plan]:
    """Return params and a plan that bring the quantized graph closer to the float one.

    `config.finetune` names the stages. Tuning starts from `params`, by default the graph's own; targets are always the
    outputs of the graph's own, the float network. After `time_budget` seconds the rest stays untuned. With
    `checkpoint`, an interrupted run resumes from that file when it is started again, and ends with the same bytes.
    Activations are kept in memory, or in files in the folder `spill`. `roundings` are your own, by name: the stage
    `own:name` rounds layers with them (docs/guides/your_own.md).

    >>> import jq
    >>> graph = jq.prepare(jq.load(jq.zoo.path("fashion_mobilenet")), "XINT8")
    >>> images, _ = jq.zoo.calibration_set()
    >>> plan = jq.make_plan(graph, jq.calibrate(graph, images[:32]))
    >>> params, plan = jq.finetune(graph, plan, images[:32], "XINT8_ADAROUND")
    >>> params.keys() == graph.params.keys()
    True
    """
    options: dict[str, Any] = {"params": params, "time_budget": time_budget, "checkpoint": checkpoint, "spill": spill}
    made, progress = tuned(graph, plan, data, resolve(config), roundings=roundings, **options)
    progress.forget()
    return made


def tuned(
    graph: Graph,
    plan: Plan,
    data: Any,
    config: QuantConfig,
    *,
    params: Mapping[str, Any] | None = None,
    time_budget: float | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    spill: str | os.PathLike[str] | None = None,
    roundings: Mapping[str, Rounding] | None = None,
    known: MutableMapping[str, Any] | None = None,
) -> tuple[tuple[dict[str, Any], Plan], Progress]:
    """Return what `finetune` does, and its progress, to be forgotten once what was made of it is kept elsewhere.

    `known` keeps what each stage ended with: a later call that begins with the same stages, on the same data, continues from there.
    """
    start, roundings = time.perf_counter(), dict(roundings or {})

    def in_time() -> bool:
        return time_budget is None or time.perf_counter() - start < time_budget

    check_tunable(config, plan, roundings)
    data = readable_again(data, graph.inputs, config.seed)
    source = open_source(data, graph.inputs, seed=config.seed)
    graph = of_data(traceable(graph), source.head)
    params = dict(graph.params) | dict(params or {})
    with contextlib.ExitStack() as stack:
        folder = None
        if spill is not None:
            os.makedirs(spill, exist_ok=True)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=spill)))
        saved = Progress.open(checkpoint, graph, plan, params, data, config, roundings)
        store = store_of(graph, plan, source, folder)
        parts = [units(graph, plan, kind_of(stage)) for stage in config.stages]
        keys, first = list[str](), 0
        if known is not None:
            keys = [_identity(graph, params, plan, config, number + 1, roundings) for number in range(len(parts))]
            first = max((number + 1 for number, key in enumerate(keys) if key in known), default=0)
            params, plan = known[keys[first - 1]] if first else (params, plan)
        total = sum(bool(u.layers) for group in parts[first:] for u in group)
        report = stack.enter_context(unit_bar("finetune", total))
        for number, group in enumerate(parts[first:], first):

            def done(
                i: int, arrays: dict[str, Any], scales: dict[str, QParams], record: Record, number: int = number
            ) -> bool:
                saved.keep(number, i, arrays, scales)
                report(record.unit, record.before, record.after)
                return in_time()

            if not in_time():
                break
            given = (graph, params, plan, group, store, config, number, roundings)
            params, plan = tune_stage(*given, skip=saved.done(number), done=done)
            if known is not None and in_time():
                known[keys[number]] = params, plan
                for old in [key for key in known if key.startswith(_TUNED)][:-_KEPT]:
                    del known[old]
    # Without time for all of it, more can be tuned from what there is.
    return (params, rescaled(graph, plan)), saved if in_time() else Progress(plan, complete=False)


def _identity(
    graph: Graph,
    params: Mapping[str, Any],
    plan: Plan,
    config: QuantConfig,
    count: int,
    roundings: Mapping[str, Rounding],
) -> str:
    """A hash of everything that the first stages of a config depend on, except the data."""
    stages = config.replace(finetune="+".join(config.stages[:count]))
    return f"{_TUNED}{digest(graph, params, plan, stages.to_dict(), roundings)}"


def check_tunable(config: QuantConfig, plan: Plan, roundings: Mapping[str, Rounding] | None = None) -> None:
    """Raise a ConfigError where there is no stage, a stage has no rounding, or nothing could be tuned."""
    if not config.finetune:
        raise ConfigError(
            "finetuning needs a stage; got finetune=None; use a preset such as XINT8_ADAROUND, or replace(finetune=...)"
        )
    if config.strict_quark:
        raise ConfigError(
            "finetuning needs strict_quark=False; got True: Quark's finetuning is not reproduced bit for bit"
        )
    if any(q.dynamic for q in plan.activations.values()):
        raise ConfigError("finetuning needs fixed scales of activations; got dynamic ones; use dynamic=False")
    again = [s for i, s in enumerate(config.stages) if i and kind_of(s) == "layer"]
    if again:
        text = f"finetune={config.finetune!r}: {again[-1]!r} rounds the float weights again, so that earlier tuning"
        warnings.warn(f"{text} is lost; begin with one layer stage, then block or network", stacklevel=3)
    check_roundings(config, roundings or {})


def check_roundings(config: QuantConfig, roundings: Mapping[str, Rounding]) -> None:
    """Raise a ConfigError where a stage has no rounding, or a rounding no stage."""
    named = {s.removeprefix(OWN) for s in config.stages if s.startswith(OWN)}
    if named != roundings.keys():
        raise ConfigError(
            f"finetune={config.finetune!r} needs roundings for {sorted(named) or 'no stage'}; got "
            f"{sorted(roundings) or 'none'}; a rounding x is a function in roundings={{'x': ...}} and the stage '{OWN}x'"
        )


def tune_stage(
    graph: Graph,
    params: dict[str, Any],
    plan: Plan,
    group: list[Unit],
    store: Store,
    config: QuantConfig,
    number: int,
    roundings: Mapping[str, Rounding] | None = None,
    *,
    skip: Mapping[int, Change] | None = None,
    done: Callable[[int, dict[str, Any], dict[str, QParams], Record], bool] = lambda *_: True,
) -> tuple[dict[str, Any], Plan]:
    """Return params and plan after one of the config's stages, by its number, on the units of a group.

    What a stage learned by gradient on blocks or the network is kept if the network is no worse on samples held back.
    """
    if config.stages[number] == "exponents":
        return _tune_exponents(graph, params, plan, store, config, skip or {}, done)
    learns = kind_of(config.stages[number]) != "layer"
    held = HeldBack.of(graph, params, plan, store) if learns else None
    seen = store if held is None else held.others
    tune = _method(graph, plan, config, group, seen, number, roundings or {})
    given, skip = (graph, params, plan, group, seen, tune), skip or {}
    with rehearsed(*given, skip=skip) as passed:

        def counted(*record: Any) -> bool:
            passed()
            return done(*record)

        made = walk(*given, skip=skip, done=counted)
    return (made.params, made.plan) if held is None or held.is_no_worse(made.params, made.plan) else (params, plan)


def _tune_exponents(
    graph: Graph,
    params: dict[str, Any],
    plan: Plan,
    store: Store,
    config: QuantConfig,
    skip: Mapping[int, Change],
    done: Callable[[int, dict[str, Any], dict[str, QParams], Record], bool],
) -> tuple[dict[str, Any], Plan]:
    """The stage that is a search over plans: weights stay as they are."""
    if 0 in skip:
        return params, plan.replace(skip[0][1])
    start, search = time.perf_counter(), searched(graph, params, plan, store.samples(), config)
    moved = {k: search.plan[k] for k in plan.activations if search.plan[k].scale != plan[k].scale}
    done(0, {}, moved, Record("exponents", search.before, search.after, time.perf_counter() - start))
    return params, search.plan


def kind_of(stage: str) -> Kind:
    """The units that a stage tunes."""
    return "block" if stage in ("block", "brecq") else "network" if stage in ("network", "exponents") else "layer"


def draws(stage: str, group: list[Unit], plan: Plan) -> bool:
    """Whether a stage's result on a group depends on the seed: only gradients use random samples."""
    linear = all(can_round(unit, unit.plan(plan)) for unit in group if unit.layers)
    return kind_of(stage) != "layer" or (stage == "adaquant" and not linear)


def rounding_of(stage: str, config: QuantConfig, roundings: Mapping[str, Rounding]) -> Rounding:
    """The rounding of a stage that tunes layers."""
    numbers = _given(steps=config.finetune_steps, learning_rate=config.finetune_rate)
    match stage:
        case "adaround":
            return Then(AdaRound(**numbers), CoordinateDescent())
        case "adaround_only":
            return AdaRound(**numbers)
        case "descent":
            return CoordinateDescent()
        case "adaquant":
            return AdaQuant(**numbers)
        case "gptq":
            return GPTQ()
        case "gpfq":
            return GPFQ()
        case "flexround":
            return FlexRound(**numbers)
    return roundings[stage.removeprefix(OWN)]


def _given(**settings: Any) -> dict[str, Any]:
    return {k: v for k, v in settings.items() if v is not None}


def _method(
    graph: Graph, plan: Plan, config: QuantConfig, parts: list[Unit], store: Store, number: int,
    roundings: Mapping[str, Rounding],
) -> Tune:  # fmt: skip
    """How each unit is tuned in a stage."""
    stage = config.stages[number]
    key = jax.random.fold_in(jax.random.key(config.seed), number)
    soft, blocks = stage == "brecq", kind_of(stage) == "block"
    numbers = _given(steps=config.finetune_steps or (_SOFT_STEPS if soft else None), weights=config.finetune_rate)
    drop, at_once, norm = (config.finetune_drop or None, None, config.finetune_norm) if blocks else (None, 2, 2.0)
    batch = config.finetune_batch
    how = Reconstruction(batch=batch, drop=drop, at_once=at_once, norm=norm, **numbers)
    by_layer, searches = kind_of(stage) == "layer", config.tune_weight_exponents and config.scale == "power_of_two"
    free = [] if by_layer else _free(graph, plan, config)
    first = {k: chunks[0] for k, chunks in store.inputs.items()}
    counts = {} if by_layer else fisher(graph, parts, first, key)

    def allowed(site: Site, moved: Site) -> bool:
        whole = site.network.replace(site.unit.outside({k: moved.plan[k] for k in moved.plan}))
        return len(violations(graph, whole, config)) <= len(violations(graph, site.network, config))

    def reconstruct(site: Site) -> tuple[Site, float, float]:
        importance = site.unit.inside({t: counts[t] for t in site.unit.outputs if t in counts})
        named = [tuple(site.unit.names.get(t, "") for t in group) for group in free]
        groups = [group for group in named if site.plan.activations.keys() >= set(group)]
        may = functools.partial(allowed, site)
        own = [k for k, q in site.plan.weights.items() if is_searched(q)]
        scaled, softly = own if searches else (), own if soft else ()
        return tune_unit(site, how, groups, may, importance, jax.random.fold_in(key, site.index), scaled, softly)

    if not by_layer:
        return reconstruct
    if stage == "bias":
        return lambda site: fit_bias(site) if can_round(site.unit, site.plan) else (site, float("nan"), float("nan"))
    rounding = rounding_of(stage, config, roundings)
    exponents = EXPONENTS if searches else EXPONENTS[:1]

    def tune(site: Site) -> tuple[Site, float, float]:
        if can_round(site.unit, site.plan):
            return tune_layer(site, rounding, exponents, functools.partial(allowed, site))
        return reconstruct(site) if stage == "adaquant" else (site, float("nan"), float("nan"))

    return tune


def is_searched(qparams: QParams) -> bool:
    """Whether a weight has powers of two that can be learned: codes of few bits around zero."""
    integers = isinstance(qparams.grid, Integer) and qparams.grid.bits <= INT16.bits
    return integers and qparams.coded is None and not np.any(qparams.zero_point)


def rescaled(graph: Graph, plan: Plan) -> Plan:
    """The plan with biases in 32 bits at the scales of the products that they are added to now."""
    nodes = {b: n for n in graph.nodes if (b := bias_of(graph, n)) in plan.weights and plan[str(b)].grid == INT32}
    return with_product_scales(plan, {str(b): n for b, n in nodes.items()})


def _free(graph: Graph, plan: Plan, config: QuantConfig) -> list[tuple[str, ...]]:
    """The groups of activations whose powers of two may change, each group as one."""
    groups = moving_together(graph, plan, config)
    alike = [group for group in groups if len({float(plan[t].scale) for t in group}) == 1]
    return [group for group in alike if all(t in plan.activations for t in group)]
