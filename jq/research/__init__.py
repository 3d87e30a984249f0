"""What one asks of quantization rather than what one ships: searches and ablations over plans, which are data."""

from jq.research.ablate import ablate, work_of
from jq.research.descent import Step
from jq.research.experiment import Experiment, Subject, grid, read_experiment
from jq.research.exponents import Search, search_exponents
from jq.research.integer_factors import equalize_pow2
from jq.research.tables import Results

__all__ = [
    "Experiment",
    "Results",
    "Search",
    "Step",
    "Subject",
    "ablate",
    "equalize_pow2",
    "grid",
    "read_experiment",
    "search_exponents",
    "work_of",
]
