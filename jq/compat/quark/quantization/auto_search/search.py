"""`AutoSearch`: the configs of a space one after another, until enough of them are near the float model."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantType

from jq.compat.quark.calibration import LayerWiseMethod, PowerOfTwoMethod
from jq.compat.quark.quantization.auto_search.space import Options, SearchSpace, split_config_levels
from jq.compat.quark.quantization.auto_search.trials import Journal, Trials
from jq.compat.quark.quantization.config.config import Config, QuantizationConfig
from jq.errors import ConfigError, Error, check_choice

# Extra options that have an effect under one method of calibration alone; a space combines them with all.
_OF_METHODS: Mapping[str, Any] = {
    "CalibMovingAverage": CalibrationMethod.MinMax,
    "CalibMovingAverageConstant": CalibrationMethod.MinMax,
    "Percentile": CalibrationMethod.Percentile,
}


class AutoSearchConfig:
    """A search: the configs it tries, and the conditions that end it.

    Any class or object with these attributes serves, and may leave some out.
    """

    search_space: Mapping[str, Any] = {
        "calibrate_method": [
            PowerOfTwoMethod.MinMSE, PowerOfTwoMethod.NonOverflow, CalibrationMethod.MinMax, CalibrationMethod.Entropy,
            CalibrationMethod.Percentile, LayerWiseMethod.LayerWisePercentile,
        ],
        "activation_type": [QuantType.QInt8, QuantType.QInt16],
        "weight_type": [QuantType.QInt8, QuantType.QInt16],
        "include_cle": [True, False],
        "include_auto_mp": [False, True],
        "include_fast_ft": [False, True],
        "include_sq": [False, True],
        "extra_options": {
            "ActivationSymmetric": [True, False],
            "WeightSymmetric": [True, False],
            "CalibMovingAverage": [True, False],
            "CalibMovingAverageConstant": [0.01, 0.001],
            "Percentile": [99.99, 99.999],
            "SmoothAlpha": [0.5, 0.6],
            "FastFinetune": {
                "DataSize": [500, 1000],
                "NumIterations": [100, 1000],
                "OptimAlgorithm": ["adaround", "adaquant"],
                "LearningRate": [0.01, 0.001, 0.0001],
                "FixedSeed": [42],
            },
        },
    }  # fmt: skip
    search_metric: str = "L2"
    search_algo: str = "grid_search"
    search_evaluator: Any = None
    search_metric_tolerance: float = 2.00e4
    search_cache_dir: str = "./"
    search_output_dir: str = "./"
    search_log_path: str = "./auto_search.log"
    two_stage_search: bool = False
    advanced_fastft_search: bool = False
    search_stop_condition: Mapping[str, float] = {
        "find_n_candidates": 1e3, "iteration_limit": 1e5, "time_limit": 30 * 24 * 3600
    }  # fmt: skip


class AutoSearch:
    """Search of the configs in a space for those whose outputs are within a tolerance of the float model's.

    Each trial changes `config`. A combination that jq refuses counts as a trial without a result, and is named in the
    log; for a metric of which more is better, a candidate has at least the tolerance.
    """

    def __init__(
        self,
        model_input: str | os.PathLike[str],
        config: Config,
        auto_search_config: Any = None,
        eval_dataloader: Any = None,
        calibration_data_reader: CalibrationDataReader | None = None,
        calibration_data_path: str | os.PathLike[str] | None = None,
    ) -> None:
        self.config, self.model_input = config, model_input
        self.auto_search_config = AutoSearchConfig() if auto_search_config is None else auto_search_config
        self.calibration_data = calibration_data_path if calibration_data_reader is None else calibration_data_reader
        self.eval_dataloader = eval_dataloader
        if self._asked("advanced_fastft_search"):
            raise ConfigError("advanced_fastft_search is not supported; use two_stage_search with lists of values")
        check_choice("search_algo", self._asked("search_algo"), ("grid_search", "random"))
        self.all_configs = self.build_all_configs(self._asked("search_space"))
        self.candidates: list[Options] = []
        self.searched_space: dict[int, float] = {}

    def _asked(self, name: str) -> Any:
        """A setting of the user's, or Quark's default where that is missing or None."""
        given = getattr(self.auto_search_config, name, None)
        return getattr(AutoSearchConfig, name) if given is None else given

    def build_all_configs(self, search_space_config: Mapping[str, Any]) -> list[Options]:
        """Return all configs in a space."""
        return SearchSpace(search_space_config).get_all_configs()

    def search_model(self) -> list[Options]:
        """Return the candidates that were found, each with its index, its difference and its file."""
        folder = Path(self._asked("search_output_dir"))
        journal = Journal(folder / "auto_search.log")
        evaluator, metric = self._asked("search_evaluator"), self._asked("search_metric")
        trials = Trials(self.model_input, self.calibration_data, self.eval_dataloader, metric, evaluator)
        if self._asked("two_stage_search"):
            return [self._two_stages(trials, journal, folder)]
        configs = list(self.all_configs)
        if self._asked("search_algo") == "random":
            configs = random.Random(0).sample(configs, len(configs))  # noqa: S311  an order, not a secret
        limits = {**AutoSearchConfig.search_stop_condition, **self._asked("search_stop_condition")}
        tolerance = self._asked("search_metric_tolerance")
        for index, loss in self._losses(configs, trials, journal, folder):
            self.searched_space[index] = difference = trials.shown(loss)
            path = folder / f"iter_{index}.onnx"
            if loss <= trials.shown(tolerance):
                self.candidates.append({"config_index": index, "difference": difference, "model_path": str(path)})
            else:
                for file in (path, path.with_name(f"{path.name}.data")):
                    file.unlink(missing_ok=True)
            done = {
                "find_n_candidates": len(self.candidates),
                "iteration_limit": index + 1,
                "time_limit": trials.seconds,
            }
            if any(limits[name] != -1 and reached >= limits[name] for name, reached in done.items()):
                break
        journal.ranking({i: trials.shown(d) for i, d in self.searched_space.items()}, trials.shown)
        journal.note(f"{len(self.candidates)} of {len(self.searched_space)} configs meet the tolerance {tolerance}")
        return self.candidates

    def _losses(
        self, configs: Sequence[Options], trials: Trials, journal: Journal, folder: Path
    ) -> Iterator[tuple[int, float]]:
        """Yield the index and the loss of each config that jq takes."""
        for index, options in enumerate(configs):
            journal.note(f"config {index}: {options}")
            try:
                loss = trials.loss(self._changed(options), folder / f"iter_{index}.onnx")
            except Error as error:
                journal.note(f"config {index}: not tried: {error}")
                continue
            journal.note(f"config {index}: {trials.counted} {trials.shown(loss):.6g}")
            yield index, loss

    def _changed(self, options: Options) -> Config:
        """The search's own config with a trial's options in it."""
        fields, extra, tuning = split_config_levels(options)
        settings: QuantizationConfig = copy.deepcopy(self.config.global_quant_config)
        for name, value in fields.items():
            setattr(settings, name, value)
        idle = [name for name, method in _OF_METHODS.items() if settings.calibrate_method != method]
        settings.extra_options |= {k: v for k, v in extra.items() if k not in idle}
        if not settings.extra_options.get("CalibMovingAverage"):
            settings.extra_options.pop("CalibMovingAverageConstant", None)
        if not settings.include_sq:
            settings.extra_options.pop("SmoothAlpha", None)
        if settings.include_fast_ft:
            settings.extra_options["FastFinetune"] = {**settings.extra_options.get("FastFinetune", {}), **tuning}
        return Config(settings)

    def _two_stages(self, trials: Trials, journal: Journal, folder: Path) -> Options:
        """Return the best calibration without finetuning, with the finetuning that is best for it."""
        levels = [split_config_levels(options) for options in self.all_configs]
        tunings = _distinct([tuning for *_, tuning in levels if tuning])
        if not tunings:
            raise ConfigError("two_stage_search needs a search_space with FastFinetune in its extra_options")
        plain = _distinct([fields | {"include_fast_ft": False, "extra_options": extra} for fields, extra, _ in levels])
        best = plain[self._best(plain, trials, journal, folder)] | {"include_fast_ft": True}
        tuned = [best | {"extra_options": {**best["extra_options"], "FastFinetune": tuning}} for tuning in tunings]
        return tuned[self._best(tuned, trials, journal, folder)]

    def _best(self, configs: Sequence[Options], trials: Trials, journal: Journal, folder: Path) -> int:
        losses = dict(self._losses(configs, trials, journal, folder))
        if not losses:
            raise ConfigError(f"none of the {len(configs)} configs is supported; auto_search.log gives the reasons")
        return min(losses, key=lambda index: (losses[index], index))


def _distinct(values: Sequence[Options]) -> list[Options]:
    return [value for i, value in enumerate(values) if value not in values[:i]]
