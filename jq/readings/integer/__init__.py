"""The chip on the desk: quantized models in the integers of AMD's NPU, as its public reference emulators compute them."""

from jq.npu.targets import AIE2_EVEN, AIE2_X1, DPU, ORT, TARGETS, PartialSums, Target
from jq.readings.agreement import Agreement
from jq.readings.integer.chip import Chip, load
from jq.readings.integer.explain import Log, RoundingRow
from jq.readings.integer.simulation import Simulation, simulate

__all__ = [
    "AIE2_EVEN", "AIE2_X1", "DPU", "ORT", "TARGETS", "Agreement", "Chip", "Log", "PartialSums", "RoundingRow",
    "Simulation", "Target", "load", "simulate",
]  # fmt: skip
