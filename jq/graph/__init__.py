"""The one graph: an ONNX model as an immutable value, read from a file and written to one."""

from jq.graph.model import Dim, Graph, Node, Value, is_structural

__all__ = ["Dim", "Graph", "Node", "Value", "is_structural"]
