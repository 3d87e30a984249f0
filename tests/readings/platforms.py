"""Every program that flows of the package compile, lowered for CUDA and TPU; run in a process of its own.

    python tests/readings/platforms.py FLOW

Prints one JSON object: how many programs, and for each that is not for accelerators, why not. `jax.jit` is replaced before
the package is imported, so that no program is missed, and readings choose what they choose off the CPU.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import export
from onnx import helper, numpy_helper

PLATFORMS = ("cuda", "tpu")
FORBIDDEN = {
    "64-bit floats": re.compile(r"\bf64\b"),
    "a callback of the host": re.compile(r"callback"),
    "a call of a CPU's library": re.compile(r"custom_call @\"?(?:lapack|__onednn|__eigen|__pocketfft|ducc)"),
}
compiling, seen = jax.jit, set[Any]()
faults: list[str] = []


def jit(fun: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`jax.jit` that also lowers what it compiles for accelerators."""
    if fun is None:
        return functools.partial(jit, **options)
    made, static = compiling(fun, **options), {k: v for k, v in options.items() if k.startswith("static")}
    other = compiling(fun, **static)

    def lowering(*given: Any, **keywords: Any) -> None:
        leaves, tree = jax.tree.flatten((given, keywords))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return
        key = made, tree, tuple((np.shape(v), str(getattr(v, "dtype", type(v)))) for v in leaves)
        if key in seen:
            return
        seen.add(key)
        name = f"{fun.__module__}.{fun.__qualname__}" if hasattr(fun, "__qualname__") else repr(fun)
        try:
            text = str(export.export(other, platforms=PLATFORMS)(*given, **keywords).mlir_module())
        except Exception as error:  # whatever a rule raises
            faults.append(f"{name}: {type(error).__name__}: {error}"[:400])
            return
        faults.extend(f"{name}: {what}" for what, pattern in FORBIDDEN.items() if pattern.search(text))

    class Lowered:
        """A compiled function."""

        __wrapped__ = fun

        def __call__(self, *given: Any, **keywords: Any) -> Any:
            lowering(*given, **keywords)
            return made(*given, **keywords)

        def lower(self, *given: Any, **keywords: Any) -> Any:
            lowering(*given, **keywords)
            return made.lower(*given, **keywords)

    return functools.wraps(fun)(Lowered()) if hasattr(fun, "__name__") else Lowered()


def network() -> bytes:
    """A small network of the kinds of layers that networks have: convolutions, also depthwise, ReLU6, a sum and a Gemm."""
    rng, nodes, weights = np.random.default_rng(0), [], {}

    def layer(op: str, x: str, y: str, *shape: int, **attributes: Any) -> None:
        weights[f"{y}.w"] = (rng.standard_normal(shape) / np.prod(shape[1:]) ** 0.5).astype(np.float32)
        weights[f"{y}.b"] = rng.standard_normal(shape[0]).astype(np.float32)
        nodes.append(helper.make_node(op, [x, f"{y}.w", f"{y}.b"], [y], name=y, **attributes))

    def clip(x: str, y: str) -> None:
        nodes.append(helper.make_node("Clip", [x, "zero", "six"], [y]))

    weights |= {"zero": np.float32(0), "six": np.float32(6)}
    layer("Conv", "x", "stem", 8, 3, 3, 3, pads=[1, 1, 1, 1], strides=[2, 2])
    clip("stem", "a")
    layer("Conv", "a", "depthwise", 8, 1, 3, 3, pads=[1, 1, 1, 1], group=8)
    clip("depthwise", "b")
    layer("Conv", "b", "project", 8, 8, 1, 1)
    nodes.append(helper.make_node("Add", ["a", "project"], ["sum"]))
    layer("Conv", "sum", "gated", 8, 8, 1, 1)
    nodes.append(helper.make_node("Sigmoid", ["gated"], ["gate"]))
    nodes.append(helper.make_node("Mul", ["gated", "gate"], ["swish"]))
    nodes.append(helper.make_node("GlobalAveragePool", ["swish"], ["mean"]))
    nodes.append(helper.make_node("Flatten", ["mean"], ["flat"]))
    layer("Gemm", "flat", "logits", 5, 8, transB=1)
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", 1, ["N", 3, 12, 12])],
        [helper.make_tensor_value_info("logits", 1, ["N", 5])],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


def main() -> None:
    jax.jit = jit
    warnings.simplefilter("ignore")
    import jq
    from jq.readings import tracing, walk
    from jq.readings.integer import chip
    from jq.research import lanes

    for module in (walk, tracing, chip, lanes):
        module.best_lowering = lambda: "native"
    path, images = network(), np.random.default_rng(1).standard_normal((8, 3, 12, 12)).astype(np.float32)

    def quantized(name: str) -> Any:
        config = jq.presets[name]
        return jq.quantize(path, images, config.replace(finetune_steps=2) if config.finetune else config)

    def integers() -> None:
        reading = jq.integer.load(quantized("XINT8").model.SerializeToString(), target="aie2_x1")
        reading({"x": images})
        reading.explain({"x": images})

    def research() -> None:
        made = quantized("XINT8")
        jq.research.sensitivity(made.graph, made.plan, images, by="layer", screen=2)
        jq.research.search_exponents(made.graph, made.plan, images, method="joint")
        jq.research.fisher(made.graph, images)

    flows: dict[str, Callable[[], Any]] = {
        "calibration": lambda: [quantized("XINT8"), quantized("S8S8_AAWS")],
        "finetuning": lambda: [quantized("XINT8_ADAROUND"), quantized("XINT8_ADAQUANT")],
        "integers": integers,
        "research": research,
        "float": lambda: jq.compare(path, quantized("XINT8").model, images),
    }
    flows[sys.argv[1]]()
    print(json.dumps({"programs": len(seen), "faults": faults}))


if __name__ == "__main__":
    main()
