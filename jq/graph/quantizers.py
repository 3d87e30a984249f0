"""The operators that make a model a quantized one: quantizers, of ONNX and of vendors, and operators on their codes."""

from __future__ import annotations

from jq.graph.domains import CONTRIB, MICROSOFT, QUARK, VITIS
from jq.graph.model import Node

_PREFIXES = {"": "", MICROSOFT: "", VITIS: "Vitis", QUARK: "Extended"}  # of QuantizeLinear and its inverse, by domain
_PAIR = QUANTIZERS = ("QuantizeLinear", "DequantizeLinear")  # and how their names end in vendors' forms
_BLOCKS = {QUARK: ("BFPQuantizeDequantize", "MXQuantizeDequantize"), VITIS: ("BFPFixNeuron", "MXFixNeuron")}
_ON_CODES = ("QLinear", "QGemm", "QAttention", "QEmbed", "ConvInteger", "MatMulInteger", "MatMulNBits")  # beginnings


def is_quantized(node: Node) -> bool:
    """Whether a node is one of a quantized model: a quantizer, or an operator that computes on codes."""
    return quantizes(node) or computes_on_codes(node)


def computes_on_codes(node: Node) -> bool:
    """Whether a node is an operator whose operands are codes."""
    return node.op_type.startswith(_ON_CODES)


def quantizes(node: Node) -> bool:
    """Whether a node is a quantizer of any vendor's: it makes codes, gives them back, or does both."""
    return "uantize" in node.op_type or node.op_type.endswith("FixNeuron")


def rounds(node: Node) -> bool:
    """Whether a node makes codes with a scale: QuantizeLinear, or an integer operator of onnxruntime's."""
    return node.op_type in (_PAIR[0], "QGemm") or node.op_type.startswith("QLinear")


def is_pair(node: Node) -> bool:
    """Whether a node is a QuantizeLinear or a DequantizeLinear, in whatever domain."""
    return node.op_type in _PAIR


def is_quantize(node: Node) -> bool:
    """Whether a node is a QuantizeLinear, or a vendor's form of it."""
    return node.op_type == f"{_PREFIXES.get(node.domain, '?')}{_PAIR[0]}"


def is_dequantize(node: Node) -> bool:
    """Whether a node is a DequantizeLinear, or a vendor's form of it."""
    return node.op_type == f"{_PREFIXES.get(node.domain, '?')}{_PAIR[1]}"


def is_dynamic(node: Node) -> bool:
    """Whether a node is a DynamicQuantizeLinear, which computes the scale too."""
    return (node.domain, node.op_type) == ("", "DynamicQuantizeLinear")


def is_fix_neuron(node: Node) -> bool:
    """Whether a node is a FixNeuron, which rounds at a position."""
    return (node.domain, node.op_type) == (CONTRIB, "FixNeuron")


def is_block_quantizer(node: Node) -> bool:
    """Whether a node rounds to a block format."""
    return node.op_type in _BLOCKS.get(node.domain, ())
