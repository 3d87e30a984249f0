"""Quantization research in JAX: an ONNX model, read in float, in fake-quant and in integers."""

from jq import zoo
from jq.batch import chunked
from jq.calibrate import calibrate
from jq.config import QuantConfig, presets
from jq.errors import ConfigError, DataError, Error, ModelError, UnsupportedOp
from jq.graph import Graph, Node, Value
from jq.inspect import inspect
from jq.layout import pack
from jq.onnx_read import load
from jq.onnx_write import save, to_model
from jq.passes import prepare
from jq.plan import QParams
from jq.search import activation_qparams, activation_ranges, weight_qparams
from jq.stats import Stats
from jq.trace import Traced, trace

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "DataError",
    "Error",
    "Graph",
    "ModelError",
    "Node",
    "QParams",
    "QuantConfig",
    "Stats",
    "Traced",
    "UnsupportedOp",
    "Value",
    "activation_qparams",
    "activation_ranges",
    "calibrate",
    "chunked",
    "inspect",
    "load",
    "pack",
    "prepare",
    "presets",
    "save",
    "to_model",
    "trace",
    "weight_qparams",
    "zoo",
]
