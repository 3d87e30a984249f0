"""Research on quantization: many runs as one piece of work."""

from jq.research.ablate import ablate, work_of
from jq.research.experiment import Experiment, Subject, grid, read_experiment
from jq.research.tables import Results

__all__ = ["Experiment", "Results", "Subject", "ablate", "grid", "read_experiment", "work_of"]
