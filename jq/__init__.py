"""Quantization research in JAX: an ONNX model, read in float, in fake-quant and in integers."""

from jq import npu, recovery, research, zoo
from jq.arithmetic import formats
from jq.calibration import observers
from jq.calibration.calibrate import calibrate
from jq.calibration.stats import Stats
from jq.config import QuantConfig, presets
from jq.data import images
from jq.errors import ConfigError, DataError, Error, ModelError, UnsupportedOp
from jq.evaluation import evaluate, metrics
from jq.evaluation.infer import infer
from jq.evidence.compare import compare
from jq.evidence.inspection import inspect
from jq.evidence.lint import lint
from jq.evidence.lint_rules import Finding
from jq.evidence.report import Report
from jq.exchange.conversion import convert
from jq.exchange.export import export
from jq.exchange.quantized import split_quantizers
from jq.graph import Graph, Node, Value
from jq.graph.read import load
from jq.graph.write import save, to_model
from jq.passes.prepare import prepare
from jq.passes.preprocess import preprocess
from jq.pipeline import Result, quantize
from jq.plan import Plan, QParams
from jq.plan.planning import make_plan
from jq.plan.scales import activation_qparams, activation_ranges, weight_qparams
from jq.readings import integer
from jq.readings.batches import chunked
from jq.readings.fake import FakeQuant, fake_quant
from jq.readings.named import open_reading
from jq.readings.packing import pack
from jq.readings.provider import Provider
from jq.readings.timing import Timing, benchmark
from jq.readings.tracing import Traced, trace
from jq.recovery.bias_correction import correct_biases
from jq.recovery.equalization import equalize
from jq.recovery.finetuning import finetune
from jq.research.climbing import auto
from jq.research.outcomes import AutoResult
from jq.version import __version__

__all__ = [
    "AutoResult", "ConfigError", "DataError", "Error", "FakeQuant", "Finding", "Graph", "ModelError", "Node", "Plan", "Provider",
    "QParams", "QuantConfig", "Report", "Result", "Stats", "Timing", "Traced", "UnsupportedOp", "Value",
    "__version__", "activation_qparams", "activation_ranges", "auto", "benchmark", "calibrate", "chunked", "compare",
    "convert", "correct_biases", "equalize", "evaluate", "export", "fake_quant", "finetune", "formats", "images",
    "infer", "inspect", "integer", "lint", "load", "make_plan", "metrics", "npu", "observers", "open_reading",
    "pack", "prepare", "preprocess", "presets", "quantize", "recovery", "research", "save", "split_quantizers",
    "to_model", "trace", "weight_qparams", "zoo",
]  # fmt: skip
