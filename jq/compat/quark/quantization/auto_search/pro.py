"""`AutoSearchPro`: configs drawn from a space of specs and algorithms, or all of them, for the least difference."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jq.compat.quark.quantization.auto_search.space import Options, generate_all_configs, holds
from jq.compat.quark.quantization.auto_search.trials import Journal, Trials
from jq.compat.quark.quantization.config import spec
from jq.compat.quark.quantization.config.algorithm import AdaQuantConfig, AdaRoundConfig, AlgoConfig, CLEConfig
from jq.compat.quark.quantization.config.config import QConfig
from jq.compat.quark.quantization.config.data_type import DataType
from jq.errors import ConfigError, Error, check_choice, suggest
from jq.util import files

_USUAL: Options = {
    "n_trials": 20,
    "n_jobs": 1,
    "output_dir": "./output",
    "temp_dir": "./temp_dir",
    "search_algo": "TPE",
    "search_evaluator": None,
    "search_metric": None,
    "direction": "minimize",
    "base_framework": "onnx",
    "study_storage_db": "auto_search.db",
    "load_study_if_exists": True,
    "study_name": "AutoSearch",
    "model_input": None,
    "calib_data_reader": None,
    "eval_data_reader": None,
    "two_stage_search": True,
    "plot_results": False,
}
_SAMPLERS = ("Grid", "TPE", "Random", "CmaEs", "GPS", "NSGAII", "QMC")
_TUNING = ("algorithms", "adaround_params", "adaquant_params")  # what the second stage searches
_ALGORITHMS: Mapping[str, type[AlgoConfig]] = {"cle": CLEConfig, "adaround": AdaRoundConfig, "adaquant": AdaQuantConfig}
_CHOICES: Mapping[str, Any] = {
    "calibration_method": spec.CalibMethod,
    "scale_type": spec.ScaleType,
    "quant_granularity": spec.QuantGranularity,
    "data_type": DataType,
}
_FIELDS = ("specific_layer_config", "layer_type_config", "exclude", "use_external_data_format")


def _tuning(rounds: int, rates: Mapping[str, tuple[float, float]]) -> Options:
    """The part of a space that both algorithms share: the largest number of rounds, and the bounds of the rate."""
    return {
        f"{name}_params": {
            "num_iterations": {"type": "int", "low": 3000, "high": rounds, "step": 3000},
            "learning_rate": {"type": "float", "low": low, "high": high, "log": True},
            "only_if": {"algorithms": name},
        }
        for name, (low, high) in rates.items()
    }


def _space(kinds: tuple[str, str], activation: Options, weight: Options, tuning: Options, **more: list[Any]) -> Options:
    return {
        "activation": [kinds[0]],
        "activation_params": activation | {"only_if": "activation"},
        "weight": [kinds[1]],
        "weight_params": {"symmetric": [True]} | weight | {"only_if": "weight"},
        "cle_algo": ["cle", None],
        "cle_params": {"cle_steps": [-1, 1], "only_if": {"cle_algo": "cle"}},
        "algorithms": ["adaround", "adaquant"],
        **tuning,
        **{name: [None] for name in _FIELDS[:3]},
        "use_external_data_format": [False],
        "OptimizeModel": [True],
        **more,
    }


def _spaces() -> dict[str, Options]:
    rates = {"adaquant": (1e-6, 1e-4), "adaround": (1e-2, 1e-1)}
    methods = ["MinMax", "Percentile", "LayerwisePercentile"]
    either, tensor = {"symmetric": [True, False]}, {"quant_granularity": ["Tensor"]}
    power = {"symmetric": [True], "calibration_method": ["MinMSE"]}
    aligned: dict[str, list[Any]] = {"AlignSlice": [False], "FoldRelu": [True], "AlignConcat": [True]}
    percentiles = [[99.99, 99.999, 99.9999], [99.0, 99.9, 99.99, 99.999, 99.9999]]
    tuning, longer = _tuning(20000, rates), _tuning(30000, rates | {"adaquant": (1e-6, 1e-3)})
    eight, wide = ("Int8Spec", "Int8Spec"), ("Int16Spec", "Int8Spec")
    fine = {"calibration_method": methods[:2]}
    return {
        "ADVANCED_SEARCH": _space(
            eight,
            either | {"calibration_method": methods, "scale_type": ["Float32"], **tensor},
            {"calibration_method": ["MinMax", "MinMSE"]},
            longer,
        ),
        "XINT8_SEARCH": _space(("XInt8Spec", "XInt8Spec"), power, tensor, tuning),
        "A8W8_SEARCH": _space(
            eight, either | {"calibration_method": methods}, tensor, tuning, **aligned, PercentileCandidates=percentiles
        ),
        "A16W8_SEARCH": _space(wide, either | fine, tensor, tuning, **aligned, AlignEltwiseQuantType=[True]),
    }


def get_auto_search_config(config_name: str) -> Options:
    """Return one of Quark's four configs of a search, a copy of its own.

    >>> get_auto_search_config("XINT8_SEARCH")["search_space"]["activation"]
    ['XInt8Spec']
    """
    spaces = _spaces()
    check_choice("config_name", config_name, spaces)
    return {"search_space": spaces[config_name], **copy.deepcopy(_USUAL)}


class AutoSearchPro:
    """Search of a space of specs and algorithms for the config of least difference.

    `search_algo="Grid"` tries all; any other draws `n_trials` at random from a fixed seed, where Quark has optuna's
    samplers. With `two_stage_search` all calibrations come first, without finetuning, and finetuning is searched for the
    best of them.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        for name in config:
            if name not in (*_USUAL, "search_space"):
                raise ConfigError(f"AutoSearchPro has no setting {name!r}.{suggest(name, (*_USUAL, 'search_space'))}")
        self.config = {**_USUAL, "search_space": _spaces()["ADVANCED_SEARCH"], **config}
        if self.config["model_input"] is None or self.config["calib_data_reader"] is None:
            raise ConfigError("AutoSearchPro needs model_input and calib_data_reader")
        check_choice("search_algo", self.config["search_algo"], _SAMPLERS)
        check_choice("direction", self.config["direction"], ("minimize", "maximize"))

    def run(self) -> Options:
        """Return the best config, and write it to `best_params.json` in the output folder."""
        config, folder = self.config, Path(self.config["output_dir"])
        trials = Trials(
            config["model_input"],
            config["calib_data_reader"],
            config["eval_data_reader"],
            config["search_metric"] or "L2",
            config["search_evaluator"],
        )
        journal, space = Journal(folder / "auto_search.log"), copy.deepcopy(dict(config["search_space"]))
        if config["two_stage_search"]:
            tuning = {name: space.pop(name) for name in _TUNING if name in space}
            best = _best(generate_all_configs(space), trials, journal, folder, "calibration")
            if not tuning.get("algorithms"):
                return _kept(best, folder)
            drawn = [best | chosen for chosen in self._drawn(tuning)]
        else:
            drawn = self._drawn(space)
        return _kept(_best(drawn, trials, journal, folder, "quantized"), folder)

    def _drawn(self, space: Mapping[str, Any]) -> list[Options]:
        """Return the configs to try."""
        if self.config["search_algo"] == "Grid":
            return generate_all_configs(space)[: self.config["n_trials"]]
        generator = random.Random(0)  # noqa: S311  an order, not a secret
        drawn: list[Options] = []
        for _ in range(self.config["n_trials"]):
            config = _draw(space, generator)
            drawn += [config] if config not in drawn else []
        return drawn


def _draw(space: Mapping[str, Any], generator: random.Random) -> Options:
    """Return one config of a space, its groups after what they depend on."""
    config = {name: generator.choice(values) for name, values in space.items() if isinstance(values, list)}
    for name, group in space.items():
        if isinstance(group, Mapping) and holds(group["only_if"], config):
            config[name] = {k: _drawn_value(v, generator) for k, v in group.items() if k != "only_if"}
    return config


def _drawn_value(values: Any, generator: random.Random) -> Any:
    if isinstance(values, list):
        return generator.choice(values)
    low, high = values["low"], values["high"]
    if values["type"] == "int":
        return generator.randrange(low, high + 1, values.get("step", 1))
    return (
        float(np.exp(generator.uniform(np.log(low), np.log(high))))
        if values.get("log")
        else generator.uniform(low, high)
    )


def _best(configs: list[Options], trials: Trials, journal: Journal, folder: Path, name: str) -> Options:
    """Return the config of least loss; one that jq refuses is named in the log."""
    losses: dict[int, float] = {}
    for index, options in enumerate(configs):
        journal.note(f"{name} {index}: {options}")
        try:
            losses[index] = trials.loss(config_of(options), folder / f"{name}_model_{index}.onnx")
            journal.note(f"{name} {index}: {trials.counted} {trials.shown(losses[index]):.6g}")
        except Error as error:
            journal.note(f"{name} {index}: not tried: {error}")
    if not losses:
        raise ConfigError(
            f"none of the {len(configs)} configs is supported; {folder / 'auto_search.log'} gives the reasons"
        )
    journal.ranking(losses, trials.shown)
    return configs[min(losses, key=lambda index: (losses[index], index))]


def config_of(options: Mapping[str, Any]) -> QConfig:
    """Return the `QConfig` that a config of a search stands for.

    >>> config_of({"activation": "XInt8Spec", "weight": "XInt8Spec", "algorithms": "adaround"}).algo_config[0].name
    'adaround'
    """
    given = dict(options)
    tensors = [_spec(given.pop(role, None), given.pop(f"{role}_params", {}), role) for role in ("activation", "weight")]
    algorithms = []
    for name in (given.pop("cle_algo", None), given.pop("algorithms", None)):
        if name is not None:
            check_choice("algorithms", name, _ALGORITHMS)
            algorithms.append(_ALGORITHMS[name](**_parameters(given.get(f"{name}_params", {}))))
    extra = {k: v for k, v in given.items() if k not in _FIELDS and not k.endswith("_params")}
    fields: Options = {k: given[k] for k in _FIELDS if given.get(k) is not None}
    layers = spec.QLayerConfig(input_tensors=tensors[0], weight=tensors[1])
    return QConfig(layers, algo_config=algorithms, extra_options=extra, **fields)


def _parameters(given: Mapping[str, Any]) -> Options:
    """Return an algorithm's parameters; `NumIterLR` is two of them."""
    parameters = dict(given)
    if "NumIterLR" in parameters:
        parameters["num_iterations"], parameters["learning_rate"] = parameters.pop("NumIterLR")
    return parameters


def _spec(name: Any, given: Mapping[str, Any], role: str) -> spec.QTensorConfig:
    kinds: Mapping[str, Callable[..., spec.QTensorConfig]] = {
        kind: getattr(spec, kind) for kind in vars(spec) if kind.endswith("Spec") and not kind.startswith("_")
    }
    check_choice(role, name, kinds)
    return kinds[name](**{k: _CHOICES[k][v] if k in _CHOICES else v for k, v in given.items()})


def _kept(best: Options, folder: Path) -> Options:
    files.write(folder / "best_params.json", json.dumps(best, indent=2, default=str))
    return best
