"""The form in which compilers and runtimes take operators: their attributes written out."""

from __future__ import annotations

from typing import Any

from jq.graph import Graph, Node
from jq.graph.edit import fresh
from jq.graph.schemas import defaults

_EXPLICIT = frozenset(
    {"Conv", "ConvTranspose", "Gemm", "MaxPool", "AveragePool", "LpPool", "HardSigmoid", "LeakyRelu", "Softmax"}
)


def explicit(graph: Graph) -> Graph:
    """Return the graph with every attribute of convolutions, pools and matrix products written out.

    The NPU's provider aborts where one is left to its default. Pads are counted out where shapes are known. An
    AveragePool is the exception: onnxruntime makes a QLinearAveragePool of one between quantizers, which knows no
    `dilations`, and refuses the model. So dilations of one are left out, and others get a Sum of one operand behind them.
    """
    nodes: list[Node] = []
    taken = set(graph.tensors)
    for node in graph.nodes:
        if node.op_type in _EXPLICIT and not node.domain and (attrs := _written_out(graph, node)) != dict(node.attrs):
            node = node.replace(attrs=attrs)
        if node.op_type == "AveragePool" and any(d != 1 for d in node.attrs.get("dilations", ())):
            apart = fresh(f"{node.outputs[0]}_dilated", taken)
            nodes += [node.replace(outputs=(apart,)), Node("Sum", (apart,), node.outputs)]
        else:
            nodes.append(node)
    return graph.replace(nodes=tuple(nodes))


def _written_out(graph: Graph, node: Node) -> dict[str, Any]:
    attrs = dict(defaults(node.op_type, node.domain, graph.opset())) | dict(node.attrs)
    weight = graph.values.get(node.inputs[1]) if len(node.inputs) > 1 else None
    if node.op_type in ("Conv", "ConvTranspose") and weight is not None and weight.shape is not None:
        attrs.setdefault("kernel_shape", weight.shape[2:])
    kernel = attrs.get("kernel_shape")
    if kernel is None or not all(isinstance(k, int) for k in kernel):
        return attrs
    rank = len(kernel)
    attrs.setdefault("strides", (1,) * rank)
    if node.op_type == "AveragePool":
        attrs = {k: v for k, v in attrs.items() if k != "dilations" or any(d != 1 for d in v)}
    elif node.op_type != "LpPool" or graph.opset() >= 18:
        attrs.setdefault("dilations", (1,) * rank)
    if node.op_type == "ConvTranspose":
        attrs.setdefault("output_padding", (0,) * rank)
    same = attrs.get("auto_pad", "NOTSET") in ("SAME_UPPER", "SAME_LOWER")
    source = graph.values.get(node.inputs[0])
    dims = source.shape[2:] if source is not None and source.shape is not None else ()
    spatial = [d for d in dims if isinstance(d, int)]
    if same and (node.op_type == "ConvTranspose" or not dims or len(spatial) < len(dims)):
        return attrs
    if same:
        from jq.ops.convolutions import windows  # the op table is not loaded with the package

        _, _, pads = windows(spatial, kernel, attrs["strides"], attrs.get("dilations"), None, attrs["auto_pad"])
        attrs["pads"] = (*(lo for lo, _ in pads), *(hi for _, hi in pads))
    attrs["auto_pad"] = "NOTSET"
    attrs.setdefault("pads", (0,) * (2 * rank))
    return attrs
