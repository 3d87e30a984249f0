"""Spaces of configs: lists of values for each option, and all their combinations."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from jq.errors import ConfigError

Options = dict[str, Any]
_EXTRA, _TUNING = "extra_options", "FastFinetune"


def split_config_levels(input_config: Mapping[str, Any]) -> tuple[Options, Options, Options]:
    """Return the fields of a `QuantizationConfig`, its extra options and those of its fast finetuning, each on its own.

    >>> split_config_levels({"include_cle": True, "extra_options": {"Percentile": 99.9, "FastFinetune": {"BatchSize": 2}}})
    ({'include_cle': True}, {'Percentile': 99.9}, {'BatchSize': 2})
    """
    fields = copy.deepcopy(dict(input_config))
    extra = dict(fields.pop(_EXTRA, {}))
    tuning = dict(extra.pop(_TUNING, {}))
    return fields, extra, tuning


class SearchSpace:
    """All configs in a space of `QuantizationConfig` fields, each with a list of values.

    >>> space = SearchSpace({"include_cle": [True, False], "extra_options": {"Percentile": [99.9, 99.99]}})
    >>> len(space.get_all_configs()), space.get_all_configs()[0]
    (4, {'include_cle': True, 'extra_options': {'Percentile': 99.9}})
    """

    def __init__(self, conf: Mapping[str, Any], logger: Any = None) -> None:
        self._levels = split_config_levels(conf)
        for level in self._levels:
            for name, values in level.items():
                if not isinstance(values, (list, tuple)):
                    raise ConfigError(f"search_space: {name} is {values!r}; expected a list of values to try")

    def get_all_configs(self) -> list[Options]:
        """Return the combinations; the values of the last option change first."""
        return [self._config(*each) for each in itertools.product(*map(_combinations, self._levels))]

    @staticmethod
    def _config(fields: Options, extra: Options, tuning: Options) -> Options:
        config = copy.deepcopy(fields)
        if extra or tuning:
            config[_EXTRA] = copy.deepcopy(extra) | ({_TUNING: copy.deepcopy(tuning)} if tuning else {})
        return config


def generate_all_configs(search_space: Mapping[str, Any]) -> list[Options]:
    """Return all configs in a space of `AutoSearchPro`: lists, and dicts of lists that count `only_if` something is chosen.

    >>> space = {"cle_algo": ["cle", None], "cle_params": {"cle_steps": [1, 2], "only_if": {"cle_algo": "cle"}}}
    >>> [c.get("cle_params") for c in generate_all_configs(space)]
    [{'cle_steps': 1}, {'cle_steps': 2}, None]
    """
    lists = {name: values for name, values in search_space.items() if isinstance(values, list)}
    groups = {name: dict(values) for name, values in search_space.items() if isinstance(values, Mapping)}
    for name, values in search_space.items():
        if name not in lists and (name not in groups or "only_if" not in groups[name]):
            raise ConfigError(f"search_space: {name} is {values!r}; expected a list, or a dict of lists with only_if")
    configs = list(_combinations(lists))
    for name, group in groups.items():
        condition = group.pop("only_if")
        for option, values in group.items():
            if not isinstance(values, list):
                raise ConfigError(f"search_space: {name}.{option} is {values!r}; expected a list of values to try")
        configs = [made for config in configs for made in _with_group(config, name, group, condition)]
    return configs


def _with_group(config: Options, name: str, group: Mapping[str, Any], condition: Any) -> Iterator[Options]:
    """Yield a config with each combination of a group's options; the config alone where the group does not count."""
    if not holds(condition, config):
        yield config
        return
    for combination in _combinations(group):
        yield copy.deepcopy(config) | ({name: combination} if combination else {})


def holds(condition: Any, config: Mapping[str, Any]) -> bool:
    """Whether what a group's `only_if` names was chosen.

    >>> holds("weight", {"weight": "Int8Spec"}), holds({"algorithms": "adaround"}, {"algorithms": "adaquant"})
    (True, False)
    """
    if isinstance(condition, Mapping):
        return all(config.get(name) == value for name, value in condition.items())
    return config.get(condition) is not None


def _combinations(values: Mapping[str, Any]) -> Iterator[Options]:
    yield from (dict(zip(values, each, strict=True)) for each in itertools.product(*values.values()))
