"""Where errors come from: each tensor's by parts, the outputs' by layers and blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

PARTS: Mapping[str, str] = {
    "weights": "the rounding and tuning of its weights, and the correction of its biases",
    "rounding": "its own rounding",
    "constraint": "additional rounding, because the NPU's constraints forbid a better exponent",
    "form": "another form of the operator, as the NPU has it",
}
_MOST = 0.8  # the share of the outputs' error that is called "most of it"
_NAMED = 5  # layers that the headline names


def largest(shares: Mapping[str, float]) -> str:
    """Return the part with the largest share."""
    return max(shares, key=lambda part: shares[part])


@dataclasses.dataclass(frozen=True)
class Origin:
    """The squared error of one tensor in parts that add up to 1, and the effect of the new ones on the outputs."""

    upstream: float  # the share that came in
    parts: Mapping[str, float]  # the shares that were added here, by PARTS
    effects: Mapping[str, float]  # the shares that these have of the outputs' squared error

    @property
    def effect(self) -> float:
        """The share of the outputs' squared error that begins at this tensor."""
        return sum(self.effects.values())


@dataclasses.dataclass(frozen=True)
class LayerShare:
    """A linear node with the activation behind it, any other node, or a block of these."""

    name: str
    op: str
    tensors: tuple[str, ...]
    effects: Mapping[str, float]  # by PARTS: shares of the outputs' squared error

    @property
    def effect(self) -> float:
        """The share of the outputs' squared error that begins in this layer; below 0, it compensates for others."""
        return sum(self.effects.values())

    @property
    def cause(self) -> str:
        """The part that does most to the outputs."""
        return largest(self.effects)


def summed(name: str, op: str, shares: Sequence[LayerShare]) -> LayerShare:
    """Return the shares of several layers as one.

    >>> parts = [LayerShare("a", "Conv", ("a",), {"weights": 0.25}), LayerShare("b", "Add", ("b",), {"weights": 0.5})]
    >>> summed("a .. b", "block", parts).effect
    0.75
    """
    effects = {part: sum(share.effects[part] for share in shares) for part in shares[0].effects}
    return LayerShare(name, op, tuple(t for share in shares for t in share.tensors), effects)


@dataclasses.dataclass(frozen=True)
class Attribution:
    """The squared error of the outputs by layers and by blocks of them, the largest share first."""

    layers: tuple[LayerShare, ...]
    samples: int
    blocks: tuple[LayerShare, ...] = ()

    @property
    def whole(self) -> float:
        """The sum of all shares: 1, apart from the error of a quadrature in two steps."""
        return sum(layer.effect for layer in self.layers)

    @property
    def added(self) -> float:
        """The sum of the positive shares: more than 1 where some layers compensate for others."""
        return sum(max(0.0, layer.effect) for layer in self.layers)

    def leading(self) -> tuple[LayerShare, ...]:
        """The fewest layers that cause most of the error that layers add, without those that compensate for others.

        >>> made = [LayerShare(n, "Conv", (n,), {"weights": w}) for n, w in (("a", 0.6), ("b", 0.25), ("c", 0.15))]
        >>> [layer.name for layer in Attribution(tuple(made), 16).leading()]
        ['a', 'b']
        """
        total, chosen = 0.0, list[LayerShare]()
        for layer in self.layers:
            if total >= _MOST * self.added or layer.effect <= 0:
                break
            chosen.append(layer)
            total += layer.effect
        return tuple(chosen)

    def headline(self) -> str:
        """A sentence: how many layers make most of the outputs' error, and which."""
        leading = self.leading()
        if not leading:
            return "The outputs have no error."
        share = sum(layer.effect for layer in leading) / self.added
        names = ", ".join(layer.name for layer in leading[:_NAMED])
        more = f" and {len(leading) - _NAMED} more" if len(leading) > _NAMED else ""
        causes = (
            "This layer causes" if len(leading) == 1 else f"These {len(leading)} of {len(self.layers)} layers cause"
        )
        return f"{causes} {share:.0%} of the error that is added to the outputs: {names}{more}."

    def lines(self, count: int, blocks: bool = False) -> Iterator[str]:
        """Yield a line for each of the worst layers, or blocks."""
        for layer in (self.blocks if blocks else self.layers)[:count]:
            shares = ", ".join(f"{part} {share:.1%}" for part, share in layer.effects.items() if abs(share) >= 0.0005)
            yield f"{layer.effect:>7.1%} {layer.op:<10} {layer.name}: {shares or 'nothing'}"
