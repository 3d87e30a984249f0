"""The flags of AMD's tutorials, as options of a config."""

from __future__ import annotations

from jq.config import QuantConfig
from jq.errors import ConfigError
from jq.plan.selection import literal


def algorithm_of(config: QuantConfig, fast: bool, adaround: bool, adaquant: bool) -> str | None:
    """Return the finetuning that the flags ask for: --fast_finetune is AdaRound where the config has none of its own."""
    if adaround and adaquant:
        raise ConfigError("--adaround and --adaquant are mutually exclusive; give one of them")
    if adaround or adaquant:
        return "adaround" if adaround else "adaquant"
    return config.finetune or ("adaround" if fast else None)


def as_tutorials(
    config: QuantConfig,
    cle: bool,
    algorithm: str | None,
    iterations: int | None,
    rate: float | None,
    excluded: str | None,
    subgraphs: str | None,
) -> QuantConfig:
    """Return a config with what the flags ask for; iterations and rates count relative to Quark's defaults.

    >>> as_tutorials(QuantConfig(), False, "adaround", 2000, None, "conv_1; conv_2", None).exclude
    ('conv_1', 'conv_2')
    """
    from jq.compat.quark.draft import parse_subgraphs_list  # with which `--help` would take longer

    nodes = [literal(name.strip()) for name in (excluded or "").split(";") if name.strip()]
    parts = [(tuple(first), tuple(last)) for first, last in parse_subgraphs_list(subgraphs)] if subgraphs else ()
    config = config.replace(
        cle=config.cle or cle,
        finetune=algorithm,
        exclude=(*config.exclude, *nodes),
        exclude_subgraphs=(*config.exclude_subgraphs, *parts),
    )
    if iterations is None and rate is None:
        return config
    from jq.compat.quark.options import tuning
    from jq.compat.quark.quantization.config.custom_config import DEFAULT_ADAQUANT_PARAMS, DEFAULT_ADAROUND_PARAMS

    usual = {"adaround": DEFAULT_ADAROUND_PARAMS, "adaquant": DEFAULT_ADAQUANT_PARAMS}
    if algorithm not in usual:
        raise ConfigError(f"--num_iters and --learning_rate need --adaround or --adaquant; got finetune={algorithm!r}")
    return config.replace(**tuning(algorithm, usual[algorithm], steps=iterations, rate=rate))
