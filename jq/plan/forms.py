"""The NPU's forms of operators that a plan has: those of the config that cost no more than it allows.

The chip's form of Sigmoid is HardSigmoid, up to 0.07 away, which is more than 8 bits round. The vendor's tables list
neither of them for XINT8, so that it buys no placement, and a network keeps its Sigmoids where they lose.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping

from jq.calibration.stats import Stats
from jq.config import QuantConfig
from jq.graph import Graph, Node
from jq.npu.rewrites import FORMS, NOT_QUARKS
from jq.npu.rewrites.activations import gates_itself, sigmoids

_FORM = "sigmoid_to_hard_sigmoid"


@dataclasses.dataclass(frozen=True)
class SigmoidChoice:
    """Whether the Sigmoids of a network become HardSigmoids, and by what this is decided."""

    losses: Mapping[str, float]  # of each node: the squared error that its form adds, relative to the power
    most: float | None  # that may be lost in sum; None for any loss

    @property
    def loss(self) -> float:
        """The losses in sum: errors of different nodes add up on their way to the outputs."""
        return sum(self.losses.values())

    @property
    def hard(self) -> bool:
        """Whether the form is taken."""
        return self.most is None or self.loss <= self.most

    def __str__(self) -> str:
        worst = max(self.losses, key=lambda label: self.losses[label])
        loss = f"{self.loss:.2g} in total ({self.losses[worst]:.2g} at {worst!r}, the worst)"
        if self.hard:
            return f"{len(self.losses)} become HardSigmoid, which loses {loss}; remove {_FORM} from forms to keep them"
        many = f"{len(self.losses)} stay: as HardSigmoid they would lose {loss}"
        return f"{many}, more than form_loss={self.most:g}; form_loss=None replaces them anyway"


def sigmoid_choice(
    graph: Graph, stats: Stats | None, config: QuantConfig, nodes: Collection[str]
) -> SigmoidChoice | None:
    """Return the choice for the Sigmoids among the quantized nodes; None where there are none, or nothing to choose."""
    here = [node for node in sigmoids(graph) if node.outputs[0] in nodes]
    if not here or config.strict_quark or _FORM not in config.forms:
        return None
    return SigmoidChoice({node.label: _loss(graph, stats, node) for node in here}, config.form_loss)


def forms_of(graph: Graph, stats: Stats | None, config: QuantConfig, nodes: Collection[str]) -> tuple[str, ...]:
    """Return the names of the forms of a plan, in the order in which they are applied."""
    choice = sigmoid_choice(graph, stats, config, nodes)
    left_out = {*(NOT_QUARKS if config.strict_quark else ()), *((_FORM,) if choice and not choice.hard else ())}
    return tuple(name for name in FORMS if name in config.forms and name not in left_out)


def _loss(graph: Graph, stats: Stats | None, node: Node) -> float:
    """The squared error of a Sigmoid's form, relative to the power of what it makes; infinite if it was not measured.

    Of x * sigmoid(x) that is the product; what other gates multiply is taken to be independent of them.
    """
    source = node.inputs[0]
    if stats is None or not stats.tensors.get(source, {}).get("forms"):
        return math.inf
    kind, sums = "swish" if gates_itself(graph, node) else "gate", stats.rows(source, "forms")
    lost, power = (float(sums[f"{kind}_{part}"].sum()) for part in ("lost", "power"))
    return lost / power if power else 0.0
