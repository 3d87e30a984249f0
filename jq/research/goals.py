"""Goals of `jq.auto`: a metric and its bound."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
from pathlib import Path

from jq.errors import ConfigError
from jq.research.intervals import TRUST
from jq.research.metrics import METRICS, Evaluate

OWN = "evaluate"  # the metric of a function of the user's


@dataclasses.dataclass(frozen=True)
class Goal:
    """A metric and its bound: absolute, or relative to the float network; None for none."""

    metric: str  # of METRICS, or OWN
    bound: float | None = None
    relative: bool = False

    @property
    def higher(self) -> bool:
        """Whether more is better."""
        return self.metric == OWN or METRICS[self.metric].higher

    def __str__(self) -> str:
        """The goal in words."""
        if self.bound is None:
            return f"the best {self.metric}" if self.metric == OWN else f"the knee of {self.metric} against cost"
        return f"{self.metric} {self.bound:+g} of float" if self.relative else f"{self.metric} {self.bound:g}"


def goal_of(target: str | float | None, evaluate: Evaluate | None) -> tuple[Goal, Evaluate | None]:
    """Return the goal that a text such as "top1 -0.5" states, and the function that measures it, if it is the user's own.

    A number with a sign is relative to the float network. `file.py:function 0.98` names a function in a file; with
    `evaluate`, the number alone, or behind any word, is its bound.

    >>> str(goal_of("agreement 98", None)[0]), str(goal_of("top1 -0.5", None)[0])
    ('agreement 98', 'top1 -0.5 of float')
    """
    if target is None:
        return Goal(OWN if evaluate else "sqnr"), evaluate
    words = str(target).split()
    number = words[-1] if words else ""
    name = " ".join(words[:-1])
    try:
        bound = float(number)
    except ValueError:
        bound = math.nan
    if not math.isfinite(bound):
        raise ConfigError(
            f"target {target!r} needs a metric and a number, such as 'top1 -0.5', 'agreement 98', 'kl 0.02', 'sqnr 25' or "
            "'metric.py:function 0.98'"
        )
    relative = isinstance(target, str) and number[0] in "+-"
    if ":" in name and evaluate is None:
        evaluate = _function_of(name)
    if evaluate is not None:
        return Goal(OWN, bound, relative), evaluate
    if name not in METRICS:
        known = f"one of {', '.join(METRICS)}, a function as file.py:name, or evaluate="
        raise ConfigError(f"target {target!r} needs {known}; got {name or 'a number alone'!r}")
    if name == "kl" and (bound < 0 or relative):
        raise ConfigError(
            f"target {target!r}: a KL divergence is measured from the float network, and needs a bound above 0"
        )
    return Goal(name, bound, relative and not METRICS[name].compares), None


def _function_of(text: str) -> Evaluate:
    """The function that `file.py:name` names."""
    file, _, name = text.rpartition(":")
    spec = importlib.util.spec_from_file_location(re.sub(r"\W", "_", Path(file).stem), file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise ConfigError(f"target {text!r}: there is no Python file {file!r}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"target {text!r}: {file} raised {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"target {text!r}: {file} has no function {name!r}")
    return function


def samples_needed(goal: Goal) -> int | None:
    """Return how many samples could show a bound in percent, if all of them agree; None of other metrics.

    >>> samples_needed(Goal("agreement", 98.0)), samples_needed(Goal("top1", -0.5, True))
    (149, 598)
    """
    if goal.bound is None or goal.metric == OWN or not METRICS[goal.metric].shares:
        return None
    share = 1 + goal.bound / 100 if goal.relative else goal.bound / 100
    return math.ceil(math.log(1 - TRUST) / math.log(share)) if 0 < share < 1 else None
