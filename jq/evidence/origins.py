"""Where errors come from: of each tensor by parts, of the outputs by layers, and what to do about the worst."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping, Sequence

PARTS: Mapping[str, str] = {
    "weights": "what was done to its weights: rounded, tuned, biases corrected",
    "rounding": "its own rounding",
    "constraint": "what its rounding adds because the NPU's constraints forbid a better exponent",
    "form": "another form of the operator, as the NPU has it",
}
_MOST = 0.8  # of the outputs' error, what is called most of it
_NAMED = 5  # layers that a command names


def largest(shares: Mapping[str, float]) -> str:
    """Return the part with the largest share."""
    return max(shares, key=lambda part: shares[part])


@dataclasses.dataclass(frozen=True)
class Origin:
    """The squared error of one tensor in parts that add up to 1, and what the new ones do to the outputs."""

    upstream: float  # came in
    parts: Mapping[str, float]  # by PARTS: was added here
    effects: Mapping[str, float]  # of the same: shares of the outputs' squared error

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
        """The share of the outputs' squared error that begins in this layer; below 0, it makes up for others."""
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
        """The sum of all shares: 1, but for what two steps of the integral miss."""
        return sum(layer.effect for layer in self.layers)

    @property
    def added(self) -> float:
        """The sum of the shares above 0: more than 1 where some layers make up for what others do."""
        return sum(max(0.0, layer.effect) for layer in self.layers)

    def leading(self) -> tuple[LayerShare, ...]:
        """The fewest layers that make most of the error, of what all layers add that do not make up for others.

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
        makes = "This layer makes" if len(leading) == 1 else f"These {len(leading)} of {len(self.layers)} layers make"
        return f"{makes} {share:.0%} of what is added to the outputs' error: {names}{more}."

    def lines(self, count: int, blocks: bool = False) -> Iterator[str]:
        """Yield a line for each of the worst layers, or blocks."""
        for layer in (self.blocks if blocks else self.layers)[:count]:
            shares = ", ".join(f"{part} {share:.1%}" for part, share in layer.effects.items() if abs(share) >= 0.0005)
            yield f"{layer.effect:>7.1%} {layer.op:<10} {layer.name}: {shares or 'nothing'}"

    def advice(self, model: str, data: str, preset: str) -> tuple[tuple[str, str], ...]:
        """Return what may be done about the leading layers: a sentence and a command for each, the first the likeliest."""
        leading = self.leading()
        if not leading:
            return ()
        causes = {part: sum(layer.effects.get(part, 0.0) for layer in leading) for part in PARTS}
        quantize = f"jq-quant quantize {shlex.quote(model)} --data {shlex.quote(data)} --config"
        first = leading[:_NAMED]
        exclude = " ".join(f"--exclude {shlex.quote(layer.name)}" for layer in first)
        wider = " ".join(f"--override {shlex.quote(layer.name)} activation=int16" for layer in first)
        base = preset.split("_", maxsplit=1)[0]
        known: Mapping[str, Sequence[tuple[str, str]]] = {
            "weights": [("round the weights so that layers give what they gave", f"{quantize} {base}_ADAROUND")],
            "rounding": [("give these activations 16 bits", f"{quantize} {preset} {wider}")],
            "constraint": [("take float scales, which have no constraints; XINT8 hardware does not take them",
                            f"{quantize} A8W8")],
            "form": [("keep the operators as they are; they run on the CPU then",
                      f"{quantize} {preset} --set form_loss=0")],
        }  # fmt: skip
        ranked = [c for part in sorted(causes, key=lambda p: -causes[p]) if causes[part] > 0 for c in known[part]]
        return (*ranked, ("leave the worst in float", f"{quantize} {preset} {exclude}"))
