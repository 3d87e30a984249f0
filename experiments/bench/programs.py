"""How many programs XLA compiles: calibration, finetuning, the integer reading and its second batch.

    python experiments/bench/programs.py

On the bundled networks with 32 images, each step from empty caches; casts of single numbers count, too. To compare two
trees, run each tree's own copy.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax

os.environ["JQ_CACHE"] = "off"  # what is loaded from disk is not compiled
EVENT = "/jax/core/compile/backend_compile_duration"


def counted(step: Callable[[], Any]) -> tuple[int, Any]:
    """The number of compilations in a step, and its result."""
    before = len(compiled)
    result = step()
    return len(compiled) - before, result


compiled: list[float] = []


def main() -> None:
    import jq

    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(seconds) if event == EVENT else None
    )
    images = jq.zoo.calibration_set()[0][:32]
    for network in jq.zoo.models():
        graph = jq.prepare(jq.load(jq.zoo.path(network)), "XINT8")
        jax.clear_caches()
        calibration, stats = counted(lambda graph=graph: jq.calibrate(graph, images, "XINT8"))
        plan = jq.make_plan(graph, stats)
        jax.clear_caches()
        finetuning, _ = counted(lambda graph=graph, plan=plan: jq.finetune(graph, plan, images, "XINT8_ADAROUND"))
        chip = jq.integer.load(jq.export(graph, plan).SerializeToString(), target="aie2_x1")
        jax.clear_caches()
        first, _ = counted(lambda chip=chip: chip({"input": images[:8]}))
        second, _ = counted(lambda chip=chip: chip({"input": images[8:16]}))
        print(f"{network}: calibration {calibration}, AdaRound {finetuning}, integers {first}, second batch {second}")


if __name__ == "__main__":
    main()
