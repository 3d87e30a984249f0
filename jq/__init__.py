"""Quantization research in JAX: an ONNX model, read in float, in fake-quant and in integers."""

from jq import evaluate, integer, metrics, research, zoo
from jq.batch import chunked
from jq.bias import correct_biases
from jq.calibrate import calibrate
from jq.compare import compare
from jq.config import QuantConfig, presets
from jq.convert import convert
from jq.equalize import equalize
from jq.errors import ConfigError, DataError, Error, ModelError, UnsupportedOp
from jq.export import export
from jq.fake import FakeQuant, fake_quant
from jq.finetune import finetune
from jq.graph import Graph, Node, Value
from jq.infer import infer
from jq.inspect import inspect
from jq.layout import pack
from jq.lint import Finding, lint
from jq.onnx_read import load
from jq.onnx_write import save, to_model
from jq.pipeline import Result, quantize
from jq.plan import Plan, QParams
from jq.planning import make_plan
from jq.prepare import prepare
from jq.preprocess import preprocess
from jq.quantized import split_quantizers
from jq.report import Report
from jq.search import activation_qparams, activation_ranges, weight_qparams
from jq.stats import Stats
from jq.trace import Traced, trace
from jq.version import __version__

__all__ = [
    "ConfigError",
    "DataError",
    "Error",
    "FakeQuant",
    "Finding",
    "Graph",
    "ModelError",
    "Node",
    "Plan",
    "QParams",
    "QuantConfig",
    "Report",
    "Result",
    "Stats",
    "Traced",
    "UnsupportedOp",
    "Value",
    "__version__",
    "activation_qparams",
    "activation_ranges",
    "calibrate",
    "chunked",
    "compare",
    "convert",
    "correct_biases",
    "equalize",
    "evaluate",
    "export",
    "fake_quant",
    "finetune",
    "infer",
    "inspect",
    "integer",
    "lint",
    "load",
    "make_plan",
    "metrics",
    "pack",
    "prepare",
    "preprocess",
    "presets",
    "quantize",
    "research",
    "save",
    "split_quantizers",
    "to_model",
    "trace",
    "weight_qparams",
    "zoo",
]
