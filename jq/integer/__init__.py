"""The chip on the desk: quantized models in the integers of AMD's NPU, as its public reference emulators compute them."""

from jq.integer.chip import Chip, load
from jq.integer.explain import Log, Row
from jq.integer.simulate import Agreement, Simulation, simulate
from jq.integer.target import AIE2_EVEN, AIE2_X1, DPU, ORT, TARGETS, PartialSums, Target

__all__ = [
    "AIE2_EVEN",
    "AIE2_X1",
    "DPU",
    "ORT",
    "TARGETS",
    "Agreement",
    "Chip",
    "Log",
    "PartialSums",
    "Row",
    "Simulation",
    "Target",
    "load",
    "simulate",
]
