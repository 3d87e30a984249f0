"""`AutoMixprecisionConfig` by `jq.auto`: all layers in the target's formats, then what loses most in the config's own.

Quark takes layers out of the wide format one at a time, by what each loses alone, until a metric is too bad. Here the
narrow network comes first, and regions that lose most are wide again, more of them from rung to rung, until it is good
enough: on samples that nothing was calibrated on.
"""

from __future__ import annotations

from typing import Any

from jq.arithmetic.formats import INT8, INT16, UINT8, UINT16
from jq.compat.quark.newer import inputs_of
from jq.compat.quark.quantization.config.algorithm import AutoMixprecisionConfig
from jq.compat.quark.quantization.config.spec import QLayerConfig
from jq.config import QuantConfig
from jq.errors import ConfigError
from jq.graph import Graph
from jq.pipeline import Result
from jq.research.climbing import auto
from jq.research.rungs import Climb, Rung, with_islands

_METRICS = ("kl", "sqnr")  # that are goals of `jq.auto`
_COSTS = (1.05, 1.15, 1.3, 1.5, 2.0)  # bit operations of the rungs, in units of 8 bits everywhere
_CHIP = "stx"  # whose formats are those of the rungs


def mixed(algorithm: AutoMixprecisionConfig, config: QuantConfig, graph: Graph, data: Any) -> Result:
    """Return the model that `jq.auto` finds where Quark would lower layers of a 16-bit model to the target's 8 bits."""
    narrow = _narrowed(config, algorithm.target_layer_config)
    evaluate, threshold = algorithm.metric_evaluate_fn, algorithm.metric_threshold
    if threshold is None or (evaluate is None and algorithm.metric_default not in _METRICS):
        raise ConfigError(
            f"AutoMixprecisionConfig needs a metric_threshold, and metric_default {' or '.join(_METRICS)} or a "
            f"metric_evaluate_fn of a model; got {threshold!r} and {algorithm.metric_default!r}. jq.research.sensitivity "
            "ranks layers without a threshold"
        )
    target = threshold if evaluate is not None else f"{algorithm.metric_default} {threshold:g}"
    rungs = [Rung("narrow", lambda climb: True, lambda climb: narrow), *map(_wider, _COSTS)]
    given: dict[str, Any] = {"float_islands": len(graph.nodes), "max_cost": max(_COSTS), "wide": "int16", "chip": _CHIP}
    return auto(graph, data, target=target, evaluate=evaluate, rungs=rungs, seed=config.seed, **given).result


def _wider(cost: float) -> Rung:
    """The rung with the regions in int16 that lose most, for at most a cost."""

    def config(climb: Climb) -> QuantConfig | None:
        first = climb.tried[0] if climb.tried else None
        return None if first is None else with_islands(climb, first, cost)

    return Rung(f"int16 for {cost:g}", lambda climb: True, config)


def _narrowed(config: QuantConfig, target: Any) -> QuantConfig:
    """The config with the target's activations and weights in place of its own."""
    activation = inputs_of(target) if isinstance(target, QLayerConfig) else None
    weight = target.weight if isinstance(target, QLayerConfig) else None
    sixteen = config.activation in (INT16, UINT16) and config.scale == "float"
    if activation is None or weight is None or not sixteen or activation.data_type.value not in (INT8, UINT8):
        raise ConfigError(
            "AutoMixprecisionConfig needs a config with 16-bit activations, and a target_layer_config, a QLayerConfig with "
            f"input_tensors and weight, of 8 bits; got activations of {config.activation} and {target!r}"
        )
    return config.replace(
        activation=activation.data_type.value,
        symmetric=activation.symmetric,
        weight=weight.data_type.value,
        weight_symmetric=weight.symmetric,
    )
