"""Small float networks in the structures that decide where nodes run: what the vendor's logs have, in a few layers."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from tests.passes.models import build

CHANNELS = 8


class Net:
    """Nodes of an ONNX graph in the making, each method adding a layer and returning its output."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.arrays: dict[str, np.ndarray] = {}

    def op(self, kind: str, *inputs: str, **attrs: object) -> str:
        name = f"{kind.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [f"{name}_out"], name=name, **attrs))
        return f"{name}_out"

    def array(self, name: str, value: object, dtype: type = np.float32) -> str:
        self.arrays[name] = np.asarray(value, dtype)
        return name

    def conv(self, x: str, reads: int, writes: int, kernel: int = 1, group: int = 1, bias: bool = True) -> str:
        number = len(self.nodes)
        shape = (writes, reads // group, kernel, kernel)
        weight = self.array(f"w{number}", self.rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:])))
        inputs = [x, weight, *([self.array(f"b{number}", np.zeros(writes))] if bias else [])]
        return self.op("Conv", *inputs, kernel_shape=[kernel, kernel], pads=[kernel // 2] * 4, group=group)

    def clip(self, x: str) -> str:
        return self.op("Clip", x, self.array("zero", 0.0), self.array("six", 6.0))

    def batchnorm(self, x: str, channels: int) -> str:
        number = len(self.nodes)
        values = [self.rng.uniform(0.5, 1.5, channels) for _ in range(4)]
        names = [self.array(f"bn{number}_{i}", v) for i, v in enumerate(values)]
        return self.op("BatchNormalization", x, *names)

    def classify(self, x: str, channels: int) -> onnx.ModelProto:
        flat = self.op("Flatten", self.op("GlobalAveragePool", x))
        weight = self.array("head", self.rng.standard_normal((channels, 5)))
        self.nodes.append(helper.make_node("Gemm", [flat, weight, self.array("head_bias", np.zeros(5))], ["y"], "gemm"))
        return self.model()

    def model(self) -> onnx.ModelProto:
        return build(self.nodes, self.arrays, x=(1, 3, 8, 8))


def residual(blocks: int = 2) -> onnx.ModelProto:
    net = Net()
    x = net.op("Relu", net.conv("x", 3, CHANNELS, 3))
    for _ in range(blocks):
        inner = net.conv(net.op("Relu", net.conv(x, CHANNELS, CHANNELS, 3)), CHANNELS, CHANNELS, 3)
        x = net.op("Relu", net.op("Add", x, inner))
    return net.classify(x, CHANNELS)


def inverted_bottleneck(blocks: int = 3) -> onnx.ModelProto:
    """Layers with a Clip that are not depthwise: the stem, one in each block, and the last."""
    net, wide = Net(), 2 * CHANNELS
    x = net.conv(net.clip(net.conv("x", 3, CHANNELS, 3)), CHANNELS, CHANNELS)
    for _ in range(blocks):
        inner = net.clip(net.conv(x, CHANNELS, wide))
        inner = net.clip(net.conv(inner, wide, wide, 3, group=wide))
        x = net.op("Add", x, net.conv(inner, wide, CHANNELS))
    return net.classify(net.clip(net.conv(x, CHANNELS, wide)), wide)


def squeeze_and_excite(blocks: int = 2) -> onnx.ModelProto:
    """Two gates in each block: SiLU, and the scale of channels."""
    net = Net()
    x = net.conv("x", 3, CHANNELS, 3)
    for _ in range(blocks):
        x = net.op("Mul", x, net.op("Sigmoid", x))
        gate = net.op("Relu", net.conv(net.op("GlobalAveragePool", x), CHANNELS, 4))
        x = net.op("Mul", x, net.op("Sigmoid", net.conv(gate, 4, CHANNELS)))
        x = net.conv(x, CHANNELS, CHANNELS, 3)
    return net.classify(x, CHANNELS)


def shuffled(units: int = 3) -> onnx.ModelProto:
    net, half = Net(), CHANNELS // 2
    x = net.op("Relu", net.conv("x", 3, CHANNELS, 3))
    for i in range(units):
        ends = [
            net.array(f"{k}{i}", v, np.int64) for k, v in (("s", [0]), ("m", [half]), ("e", [CHANNELS]), ("a", [1]))
        ]
        left = net.op("Slice", x, ends[0], ends[1], ends[3])
        right = net.op("Slice", x, ends[1], ends[2], ends[3])
        right = net.op("Relu", net.conv(right, half, half))
        x = net.op("Concat", left, right, axis=1)
        x = net.op("Reshape", x, net.array("five", [1, 2, half, 8, 8], np.int64))
        x = net.op("Transpose", x, perm=[0, 2, 1, 3, 4])
        x = net.op("Reshape", x, net.array("four", [1, CHANNELS, 8, 8], np.int64))
    x = net.op("Relu", net.conv(x, CHANNELS, CHANNELS))
    flat = net.op("ReduceMean", x, axes=[2, 3], keepdims=0)
    weight = net.array("head", net.rng.standard_normal((CHANNELS, 5)))
    net.nodes.append(helper.make_node("Gemm", [flat, weight], ["y"], "gemm"))
    return net.model()


def dense(layers: int = 3) -> onnx.ModelProto:
    """A BatchNormalization of its own in front of each layer, and a Concat of all before."""
    net = Net()
    features = [net.op("MaxPool", net.op("Relu", net.conv("x", 3, CHANNELS, 3)), kernel_shape=[2, 2], strides=[2, 2])]
    channels, x = CHANNELS, features[0]
    for _ in range(layers):
        inner = net.op("Relu", net.batchnorm(x, channels))
        inner = net.op("Relu", net.conv(inner, channels, CHANNELS))
        features.append(net.conv(inner, CHANNELS, CHANNELS, 3, bias=False))
        channels += CHANNELS
        x = net.op("Concat", *features, axis=1)
    return net.classify(net.op("Relu", net.batchnorm(x, channels)), channels)


def hard_gates() -> onnx.ModelProto:
    """A HardSwish, and a gate of channels: MobileNetV3's block."""
    net = Net()
    x = net.op("HardSwish", net.conv("x", 3, CHANNELS, 3))
    gate = net.op("Relu", net.conv(net.op("GlobalAveragePool", x), 8, 4))
    gate = net.op("HardSigmoid", net.conv(gate, 4, 8), alpha=1 / 6)
    return net.classify(net.op("HardSwish", net.conv(net.op("Mul", x, gate), 8, 8)), 8)
