"""Sensitivities, searches and ablations: experiments on quantization, over plans, which are data."""

from jq.recovery.exponents.descent import Step
from jq.recovery.exponents.search import Search
from jq.research.ablation import ablate, work_of
from jq.research.climbing import auto
from jq.research.curvature import fisher, hessian_trace
from jq.research.executors import Executor, Processes
from jq.research.experiment import Experiment, Subject, grid, read_experiment
from jq.research.exponents import search_exponents
from jq.research.goals import Goal
from jq.research.integer_factors import equalize_pow2
from jq.research.judging import Score
from jq.research.mixed import FormatTable, Mixed, format_table, mixed_precision
from jq.research.outcomes import AutoResult
from jq.research.rungs import RUNGS, Candidate, Climb, Limits, Rung
from jq.research.sensitivities import Sensitivity, sensitivity
from jq.research.tables import Results

__all__ = [
    "RUNGS",
    "AutoResult",
    "Candidate",
    "Climb",
    "Executor",
    "Experiment",
    "FormatTable",
    "Goal",
    "Limits",
    "Mixed",
    "Processes",
    "Results",
    "Rung",
    "Score",
    "Search",
    "Sensitivity",
    "Step",
    "Subject",
    "ablate",
    "auto",
    "equalize_pow2",
    "fisher",
    "format_table",
    "grid",
    "hessian_trace",
    "mixed_precision",
    "read_experiment",
    "search_exponents",
    "sensitivity",
    "work_of",
]  # fmt: skip
