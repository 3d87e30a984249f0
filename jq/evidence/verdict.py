"""The verdict at the top of every report: what the outputs lost, in the same figures whoever measured them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax.numpy as jnp

from jq.arithmetic.losses import kl, top1
from jq.evidence.plots import decibel
from jq.graph import Graph
from jq.ops.kinds import is_softmax

ScoreKind = Literal["", "probabilities", "logits"]
Array = Any

_LEAST = 1e-7  # probability that a logarithm is taken of


@dataclasses.dataclass(frozen=True)
class OutputLoss:
    """The distance of one output from the float model's."""

    name: str
    sqnr: float | None  # dB; None where it is no number
    same: float | None = (
        None  # the share of samples with the same best class; None for outputs that are not scores of classes
    )
    kl: float | None = None  # KL divergence of the classes' probabilities
    top1: tuple[float, float] | None = None  # of the float and of the quantized model, where labels are known
    few: int | None = None  # samples, where they are so few that a percentage would say too much

    def __str__(self) -> str:
        """The loss in words.

        >>> str(OutputLoss("logits", 14.52, 0.9375, 0.0469, (0.834, 0.818)))
        'output logits: top-1 81.8% (83.4% in float), SQNR 14.5 dB, same class for 93.8%, KL 0.0469'
        >>> str(OutputLoss("logits", 14.52, 0.75, 0.0469, few=4))
        'output logits: SQNR 14.5 dB, same class for 3 of 4, KL 0.0469'
        """
        return f"output {self.name}: " + ", ".join(f"{name} {value}" for name, value in self.figures().items())

    def figures(self) -> dict[str, str]:
        """Return the figures by name, the most telling first."""
        known = self.sqnr is not None and not math.isnan(self.sqnr)
        figures = {} if self.top1 is None else {"top-1": f"{self.top1[1]:.1%} ({self.top1[0]:.1%} in float)"}
        figures["SQNR"] = decibel(self.sqnr) if known else "not finite"
        if self.same is not None:
            few = f"{round(self.same * self.few)} of {self.few}" if self.few is not None else ""
            figures["same class for"] = few or f"{self.same:.1%}"
        return figures | ({} if self.kl is None else {"KL": f"{self.kl:.3g}"})


@dataclasses.dataclass(frozen=True)
class OutputsVerdict:
    """The loss of the outputs, on which samples it was measured, and what else a reader has to know first."""

    outputs: tuple[OutputLoss, ...] = ()
    samples: str = ""  # "64 samples", say
    sentences: tuple[str, ...] = ()

    def lines(self) -> Iterator[str]:
        """Yield the verdict as sentences.

        >>> list(OutputsVerdict((OutputLoss("y", 30.0),), "8 samples", ("nothing else",)).lines())
        ['output y: SQNR 30.0 dB, on 8 samples', 'nothing else']
        """
        yield from (f"{loss}, on {self.samples}" for loss in self.outputs)
        yield from self.sentences


def kind_of_scores(graph: Graph, name: str, shape: Sequence[int]) -> ScoreKind:
    """Return the kind of scores of classes that a tensor has, if it is an output of one sample's classes."""
    if name not in graph.output_names or len(shape) != 2 or shape[0] != 1 or shape[1] < 2:
        return ""
    made = graph.producer.get(name)
    return "probabilities" if made is not None and is_softmax(made) else "logits"


def distances(kind: ScoreKind, x: Array, y: Array) -> Array:
    """Return the KL divergence of one sample's scores, and whether the best class is another one; zeros of no scores."""
    if not kind:
        return jnp.zeros(2)
    scores = [jnp.log(jnp.maximum(v, _LEAST)) if kind == "probabilities" else v for v in (x, y)]
    return jnp.stack([kl(*scores), top1(*scores)])
