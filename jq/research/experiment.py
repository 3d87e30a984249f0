"""Ablations as data: models with their data, configs and seeds, in code or read from a file."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import runpy
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jq import zoo
from jq.config import QuantConfig, resolve
from jq.config_file import read_table
from jq.data.labels import Labels
from jq.errors import ConfigError, DataError, suggest
from jq.evaluation.accuracy import read_labels
from jq.graph.read import ModelLike

_SAMPLES = 128  # that a seed draws of the bundled calibration set, where a file does not say how many


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Subject:
    """A float model, with the data for calibration and tuning, and those for evaluation."""

    model: ModelLike
    data: Any = None  # as `jq.calibrate` takes it
    evaluation: Any = None  # likewise; `data` by default
    labels: Labels | np.ndarray | None = None  # of the evaluation's samples
    samples: int | None = None  # how many of `data` each seed draws; None for all of them, whatever the seed

    def __post_init__(self) -> None:
        whole = isinstance(self.samples, int) and not isinstance(self.samples, bool)
        if self.samples is not None and not (whole and self.samples >= 1):
            raise ConfigError(f"samples is {self.samples!r}; expected the number of samples for each seed, at least 1")

    @classmethod
    def bundled(cls, name: str, samples: int = _SAMPLES) -> Subject:
        """A bundled model with its data, of which each seed draws `samples` to calibrate on.

        >>> Subject.bundled("fashion_resnet").labels.shape
        (3000,)
        """
        images, labels = zoo.evaluation_set()
        data = zoo.calibration_set()[0]
        return cls(model=zoo.path(name), data=data, evaluation=images, labels=labels, samples=samples)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Experiment:
    """Each config on each subject with each seed."""

    subjects: Mapping[str, Subject]  # models with their data, by name
    configs: Mapping[str, QuantConfig]  # by name
    seeds: Sequence[int] = (0,)  # each in place of the configs' own; it also draws the subjects' `samples`

    def __post_init__(self) -> None:
        for name in ("subjects", "configs", "seeds"):
            if not getattr(self, name):
                raise ConfigError(f"an experiment needs {name}; got none")
        for seed in self.seeds:
            if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
                raise ConfigError(f"seeds needs whole numbers of 0 or more; got {seed!r}")
        if len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds needs each seed once; got {list(self.seeds)}")


def grid(base: QuantConfig | str = "XINT8", **options: Sequence[Any]) -> dict[str, QuantConfig]:
    """Return a config for each combination of options' values, named by those of which there are several.

    >>> list(grid("XINT8", finetune=["adaround", "block"], finetune_steps=[50]))
    ['finetune=adaround', 'finetune=block']
    """
    start, configs = resolve(base), dict[str, QuantConfig]()
    for name, values in options.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ConfigError(f"grid.{name} needs a list of values; got {values!r}")
    named = {k for k, v in options.items() if len(v) > 1} or options.keys()
    for values in itertools.product(*options.values()):
        name = " ".join(f"{k}={v}" for k, v in zip(options, values, strict=True) if k in named)
        if name in configs:
            raise ConfigError(f"a grid needs each value once; got {name} twice")
        configs[name] = start.replace(**dict(zip(options, values, strict=True)))
    return configs


def read_experiment(path: str | os.PathLike[str], only: Collection[str] = ()) -> Experiment:
    """Return the experiment of a .toml file, or of the name `experiment` in a .py file; `only` selects models.

    Paths in a TOML file are relative to its folder, and may hold environment variables ($ZOO/model.onnx).
    """
    path = Path(path)
    if path.suffix == ".py":
        experiment = runpy.run_path(str(path)).get("experiment") if path.is_file() else None
        if not isinstance(experiment, Experiment):
            raise ConfigError(f"{path} needs a script that sets `experiment` to a jq.research.Experiment")
        return dataclasses.replace(experiment, subjects=_those(experiment.subjects, only))
    document = read_table(path)
    try:
        return _experiment(document, path.parent, only)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _those(subjects: Mapping[str, Any], only: Collection[str]) -> dict[str, Any]:
    """The selected models, by default all."""
    for name in only:
        if name not in subjects:
            raise ConfigError(f"no model {name!r}.{suggest(name, subjects)} Available: {', '.join(subjects)}")
    return {k: v for k, v in subjects.items() if not only or k in only}


def _experiment(document: Mapping[str, Any], folder: Path, only: Collection[str]) -> Experiment:
    _check(document, {"models": (list, dict), "seeds": list, "samples": int, "grid": dict, "configs": dict}, "")
    samples, given = document.get("samples"), document.get("models", list(zoo.models()))
    models = _those(given if isinstance(given, dict) else {str(name): {} for name in given}, only)
    subjects = {name: _subject(name, entry, samples, folder) for name, entry in models.items()}
    configs: dict[str, QuantConfig] = {}
    if "grid" in document:
        options = dict(document["grid"])
        base = options.pop("preset", "XINT8")
        if not all(isinstance(v, list) for v in options.values()):
            name = next(k for k, v in options.items() if not isinstance(v, list))
            raise ConfigError(f"grid.{name} needs a list of values; got {options[name]!r}")
        configs |= grid(base, **{k: [_value(k, v) for v in values] for k, values in options.items()})
    for name, options in document.get("configs", {}).items():
        if not isinstance(options, dict):
            raise ConfigError(f"configs.{name} needs a table of options; got {options!r}")
        changes = {k: _value(k, v) for k, v in options.items() if k != "preset"}
        configs[name] = resolve(options.get("preset", "XINT8")).replace(**changes)
    return Experiment(subjects=subjects, configs=configs, seeds=document.get("seeds", [0]))


def _subject(name: str, entry: Any, samples: int | None, folder: Path) -> Subject:
    if not isinstance(entry, dict):
        raise ConfigError(f"models.{name} needs a table; got {entry!r}")
    _check(entry, {"path": str, "data": str, "evaluation": str, "labels": str, "label_offset": int}, f"models.{name}.")
    if "path" not in entry:
        if entry:
            raise ConfigError(f"models.{name} needs a path; got {', '.join(entry)}")
        return Subject.bundled(name, samples or _SAMPLES)
    places = {k: _place(entry[k], folder) for k in ("path", "data", "evaluation", "labels") if k in entry}
    labels = None if "labels" not in places else read_labels(places["labels"], entry.get("label_offset", 0))
    data = {k: v for k, v in places.items() if k != "labels"}
    return Subject(model=data.pop("path"), labels=labels, samples=samples, **data)


def _place(text: str, folder: Path) -> Path:
    expanded = os.path.expandvars(text)
    if missing := re.search(r"\$\{?(\w+)", expanded):
        raise ConfigError(f"{text!r} needs the environment variable {missing[1]}; set it to a folder")
    place = folder / expanded
    if not place.exists():
        raise DataError(f"{place} does not exist")
    return place


def _value(name: str, value: Any) -> Any:
    """An option's value; TOML has no null."""
    return None if value == "none" else QuantConfig.read(name, value)


def _check(table: Mapping[str, Any], known: Mapping[str, Any], where: str) -> None:
    """Raise a ConfigError for an entry that is not known, or of another type."""
    for name, value in table.items():
        if name not in known:
            raise ConfigError(f"no entry {where}{name}.{suggest(name, known)} Available: {', '.join(known)}")
        if not isinstance(value, known[name]) or isinstance(value, bool):
            kinds = known[name] if isinstance(known[name], tuple) else (known[name],)
            words = " or ".join({list: "a list", dict: "a table", str: "text", int: "a whole number"}[k] for k in kinds)
            raise ConfigError(f"{where}{name} needs {words}; got {value!r}")
