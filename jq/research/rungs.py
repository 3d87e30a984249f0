"""The rungs of `jq.auto`: each is a small value that makes the next config from the best model so far.

A rung of your own is one more value: `jq.auto(..., rungs=[*RUNGS, Rung("mine", applies, config)])`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jq.arithmetic.formats import UINT8
from jq.config import QuantConfig, presets
from jq.npu.facts import BACKEND_FORMATS, CHIPS
from jq.pipeline import Calibrated, Result
from jq.research.islands import apart, islands, price, work
from jq.research.judging import Score
from jq.research.widening import FORMATS, Wide, widened


@dataclasses.dataclass(frozen=True)
class Limits:
    """The chip, and how much more than 8 bits everywhere a model may cost on it."""

    chip: str
    most: float  # bit operations, in units of those of 8 bits; of what heads and the guard leave, where that is more
    islands: int  # that a rung may add
    wide: Wide | None  # what they are in; None: 16 bits where scales are floats and the chip has that, else float

    @property
    def formats(self) -> tuple[str, ...]:
        """The presets that the chip's default backend takes."""
        device = CHIPS[self.chip]
        return (*BACKEND_FORMATS[device.backends[0]], *(("BF16",) if device.bfloat16 else ()))

    def beside(self, left: float) -> float:
        """The most that a model may cost, if it costs this much by what heads and the guard leave in float alone."""
        return self.most if left < self.most else self.most * left


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """A model that a rung made, and what it is worth."""

    rung: str
    config: QuantConfig
    score: Score
    cost: float  # bit operations, in units of 8 bits everywhere
    narrow: float  # the share of products in 8 bits
    islands: int
    size: int  # bytes
    forecast: str  # of the places
    result: Result | None  # None where a ledger told of it

    @property
    def is_plain(self) -> bool:
        """Whether nothing is wide but what heads and the guard leave so, unless it is stricter than in the presets."""
        return not (self.config.exclude or self.config.overrides or _is_strict(self.config))


@dataclasses.dataclass(frozen=True, eq=False)
class Climb:
    """The state that a rung can look at: the best model so far, and all that were tried."""

    limits: Limits
    calibrated: Callable[[QuantConfig], Calibrated]  # the model by a config, before anything is tuned
    losses: Callable[[QuantConfig, Wide], Mapping[str, float]]  # its `part_losses`, measured once
    labels: frozenset[str] = frozenset()  # of the model's own nodes, which a config can name
    best: Candidate | None = None
    tried: tuple[Candidate, ...] = ()  # and within the limits

    @property
    def plain(self) -> tuple[Candidate, ...]:
        """Those without regions that a rung added: to them a cost and a number of regions are limits of what is added."""
        return tuple(c for c in self.tried if c.is_plain)

    @property
    def most(self) -> tuple[float, int]:
        """The most that a model may cost, and the most regions that it may have."""
        # What heads and the guard leave wide already costs this.
        left = max((c.cost / price(c.config) for c in self.plain), default=1.0)
        return self.limits.beside(left), self.limits.islands + max((c.islands for c in self.plain), default=0)


@dataclasses.dataclass(frozen=True)
class Rung:
    """One thing to try: where it applies, and the config that it makes from the best model so far."""

    name: str
    applies: Callable[[Climb], bool]
    config: Callable[[Climb], QuantConfig | None]  # None where there is nothing to change
    stops: bool = False  # it ends when time is up, as finetuning does, so that it may begin in less time than it needs


def _is_strict(config: QuantConfig) -> bool:
    return config.guard is not None and config.guard > _GUARD


_GUARD = QuantConfig().guard or 0.0  # dB
_STRICTER = 3.0, 6.0, 9.0, 12.0  # dB
_QUICK: Mapping[str, Any] = {"bias_correction": "statistics"}  # fitting biases takes longer, and is a rung of its own
_ASYMMETRIC = presets["A8W8"].replace(per_channel=True, activation=UINT8, symmetric=False, method="mse", **_QUICK)
_SYMMETRIC = presets["A8W8"].replace(per_channel=True, **_QUICK)


def _preset(name: str, **options: Any) -> Rung:
    config = presets[name].replace(**_QUICK, **options)
    return Rung(name, _takes(name), lambda climb: config)


def _takes(name: str) -> Callable[[Climb], bool]:
    return lambda climb: name in climb.limits.formats


def _is_equalized(climb: Climb) -> bool:
    """Whether equalization changed anything in asymmetric A8W8."""
    if "A8W8" not in climb.limits.formats:
        return False
    ready = climb.calibrated(_ASYMMETRIC)
    return ready.graph is not ready.prepared


def _symmetric(climb: Climb) -> QuantConfig:
    """A8W8 with a scale for each channel of weights, equalized if that was better before."""
    before = min((c for c in climb.plain if c.config.scale == "float"), key=lambda c: c.score.error, default=None)
    return _SYMMETRIC if before is None else _SYMMETRIC.replace(cle=before.config.cle)


def _is_inexact(climb: Climb) -> bool:
    return climb.best is not None and climb.best.score.error > 0


def _is_untuned(climb: Climb) -> bool:
    return _is_inexact(climb) and climb.best is not None and not climb.best.config.finetune


def _tuned(stage: str, applies: Callable[[Climb], bool] = _is_inexact) -> Rung:
    """The best with its layers tuned by a stage alone."""

    def config(climb: Climb) -> QuantConfig | None:
        assert climb.best is not None
        return climb.best.config.replace(finetune=stage)

    return Rung(stage, applies, config, stops=True)


def _then(stage: str, applies: Callable[[Climb], bool] = _is_inexact) -> Rung:
    """The best with a stage behind those that it has, and behind fitted biases if it has none."""

    def config(climb: Climb) -> QuantConfig | None:
        assert climb.best is not None
        stages = climb.best.config.stages or ("bias",)
        return climb.best.config.replace(finetune="+".join((*stages, stage)))

    return Rung(stage, applies, config, stops=True)


def _has_exponents(climb: Climb) -> bool:
    return _is_inexact(climb) and climb.best is not None and climb.best.config.scale == "power_of_two"


def _islands(climb: Climb) -> QuantConfig | None:
    """The best of those without added regions, with such: of those whose regions cost least, as more of these fit."""

    def order(candidate: Candidate) -> tuple[float, float]:
        form = FORMATS[_wide(climb.limits, candidate.config)]
        return form.own + form.read, candidate.score.error

    base = min((c for c in climb.plain if c.narrow > 0), key=order, default=None)
    return None if base is None else with_islands(climb, base, climb.limits.beside(base.cost))


def with_islands(climb: Climb, base: Candidate, most: float) -> QuantConfig | None:
    """Return a candidate's config with the regions that lose most in a wide format, at most so costly; None for none."""
    limits, config = climb.limits, base.config.replace(finetune=None)
    ready, wide = climb.calibrated(config), _wide(limits, config)

    def cost_of(config: QuantConfig) -> float:
        made = climb.calibrated(config)
        return work(made.graph, made.guarded.plan)[0]

    made = widened(config, ready, climb.losses(config, wide), wide, most, limits.islands, climb.labels, cost_of)
    return None if made is None else made.replace(finetune=base.config.finetune)


def _guarded(climb: Climb) -> QuantConfig | None:
    """The cheapest model in which the guard found something, with as strict a guard as the limits allow.

    The tensors that lose almost as much as those that it mended come next.
    """
    plain = [c for c in climb.plain if c.config.scale == "float"]
    base = min(plain, key=lambda c: (c.cost, c.score.error), default=None)
    if base is None or not (mended := len(climb.calibrated(base.config).guarded.mends)):
        return None
    (most, regions), best = climb.most, None
    for more in _STRICTER:
        config = base.config.replace(guard=_GUARD + more)
        made = climb.calibrated(config)
        plan = made.guarded.plan
        cost, count = work(made.graph, plan)[0], len(islands(made.graph, apart(made.graph, plan, config)))
        if cost > most or count > regions:
            break
        if len(made.guarded.mends) > mended:
            best = config
    return best


def _wide(limits: Limits, config: QuantConfig) -> Wide:
    """The format of a config's regions."""
    return limits.wide or ("int16" if config.scale == "float" and "A16W8" in limits.formats else "float")


def ladder() -> Iterator[Rung]:
    """The rungs in their order: the cheap ones first."""
    yield _preset("XINT8")
    yield Rung("A8W8 asymmetric", _takes("A8W8"), lambda _: _ASYMMETRIC)
    # Equalized channels all reach as far as on the samples, so that where these are few, new ones are clipped.
    yield Rung("A8W8 asymmetric, not equalized", _is_equalized, lambda _: _ASYMMETRIC.replace(cle=False))
    yield Rung("A8W8 per channel", _takes("A8W8"), _symmetric)
    yield Rung("islands", lambda climb: climb.limits.islands > 0, _islands)
    yield Rung("stricter guard", lambda climb: climb.limits.islands > 0, _guarded)
    yield _preset("A16W8", per_channel=True)
    yield _preset("BF16")
    yield _tuned("adaround")
    yield _tuned("bias", _is_untuned)  # of which AdaRound does more, in little more time
    yield _then("exponents", _has_exponents)
    yield _tuned("adaquant")
    yield _then("block")


RUNGS: Sequence[Rung] = tuple(ladder())
