"""Where and why a chip differs from the float simulation: counts for each place where it rounds.

Every node is computed twice on the same integers, as the chip does and as onnxruntime does, so that a difference is
the node's own. A difference has a cause when what was to be rounded was the same and lay on a tie, or when the chip
has a constant, a factor or fewer bits that made it another number; what has none is counted as unexplained.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jq.arithmetic import layout
from jq.graph import Graph, Node
from jq.graph.quantizers import is_pair, rounds
from jq.npu.targets import Target
from jq.ops.integer.fixed import FLOAT32_BITS, Fixed, Grid, Table, float32, position
from jq.ops.integer.rounding import cut, rescaled, ties, unchanged
from jq.readings.integer.reading import Reading, Rounding, codes
from jq.util import files

Array = Any

_CAUSE = "cause "  # in front of the causes among the counts
_NEAR = 2.0**-20  # relative: float32 values of the same number differ by less, other numbers by more


@dataclasses.dataclass(frozen=True)
class RoundingRow:
    """Counts for one tensor of integers."""

    tensor: str  # of integers, as the model names it
    node: str
    operators: str  # since the last rounding
    elements: int
    ties: int  # halfway between two integers
    saturated: int  # beyond the integers that there are, those that an activation cuts not counted
    largest: int  # magnitude of the accumulator that is rounded
    factor_error: float  # relative, of a mean
    inexact: int  # of these, float32 can have lost bits in onnxruntime: partial sums may reach 2**24
    differs: int  # from onnxruntime on the same integers
    causes: Mapping[str, int]  # of these
    diverged: int  # from onnxruntime's own run of the model

    @property
    def bits(self) -> int:
        """Bits that a signed accumulator needs for `largest`."""
        return self.largest.bit_length() + 1

    @property
    def unexplained(self) -> int:
        """Differences without a cause."""
        return self.differs - sum(self.causes.values())


@dataclasses.dataclass(frozen=True, eq=False)
class Log:
    """Counts for each rounding of a run on a chip, in its order."""

    target: str
    samples: int
    rows: tuple[RoundingRow, ...]
    floats: Mapping[str, str]  # nodes computed in float32, and why
    codes: Mapping[str, np.ndarray]  # the integers of every quantized tensor
    grids: Mapping[str, Grid]  # and what they stand for

    @property
    def first_divergence(self) -> RoundingRow | None:
        """Where the chip's run of the model first is another one than onnxruntime's."""
        return next((row for row in self.rows if row.diverged), None)

    @property
    def unexplained(self) -> int:
        """Differences from onnxruntime on the same integers that have no known cause."""
        return sum(row.unexplained for row in self.rows)

    def __add__(self, other: Log) -> Log:
        """Both batches' counts; the integers are those of the second."""
        rows = tuple(_sum(a, b) for a, b in zip(self.rows, other.rows, strict=True))
        return dataclasses.replace(other, samples=self.samples + other.samples, rows=rows)

    def summary(self) -> str:
        """Some lines: totals by cause, and where the run first diverges."""
        elements, differs = sum(r.elements for r in self.rows), sum(r.differs for r in self.rows)
        causes = sum((collections.Counter(row.causes) for row in self.rows), collections.Counter[str]())
        named = ", ".join(f"{cause} {count:,}" for cause, count in causes.most_common())
        first, flagged = self.first_divergence, sum(r.inexact for r in self.rows)
        lines = [
            f"{self.target}: {elements:,} integers of {len(self.rows)} tensors on {self.samples} samples",
            f"differ from onnxruntime on the same inputs: {differs:,} ({named or 'none'}); unexplained: {self.unexplained:,}",
            f"first divergence of the whole run: {'none' if first is None else f'{first.tensor} ({first.diverged:,})'}",
            f"float32 may have lost bits in onnxruntime: {flagged:,} integers",
        ]
        if self.floats:
            lines.append(f"computed in float32: {', '.join(f'{k} ({v})' for k, v in self.floats.items())}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the integers, for JSON."""
        rows = [dataclasses.asdict(r) | {"bits": r.bits, "unexplained": r.unexplained} for r in self.rows]
        first = self.first_divergence
        return {
            "target": self.target,
            "samples": self.samples,
            "unexplained": self.unexplained,
            "first_divergence": None if first is None else first.tensor,
            "floats": dict(self.floats),
            "tensors": rows,
        }

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict`, atomically."""
        files.write(path, json.dumps(self.to_dict(), indent=2) + "\n")


_ADDED = ("elements", "ties", "saturated", "inexact", "differs", "diverged")


def _sum(one: RoundingRow, other: RoundingRow) -> RoundingRow:
    causes = dict(collections.Counter(one.causes) + collections.Counter(other.causes))
    counts = {name: getattr(one, name) + getattr(other, name) for name in _ADDED}
    return dataclasses.replace(one, **counts, causes=causes, largest=max(one.largest, other.largest))


@dataclasses.dataclass(frozen=True, eq=False)
class Explained:
    """A reading beside onnxruntime's of the same model."""

    chip: Reading
    reference: Reading
    reference_params: Mapping[str, Any]

    def run(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Log]:
        """The model's outputs and the log of this batch."""
        outputs, integers, counts, learned = self._program(params, self.reference_params, inputs)
        operators = _operators(self.chip.graph)
        rows = tuple(
            _row(name, node, operators[name], error, {k: int(v) for k, v in counts[name].items()})
            for name, (node, _, error) in learned.places.items()
        )
        samples = next((len(inputs[v.name]) for v in self.chip.graph.inputs if np.ndim(inputs[v.name])), 1)
        integers = {row.tensor: np.asarray(integers[row.tensor]) for row in rows}
        grids = {name: grid for name, (_, grid, _) in learned.places.items()}
        return outputs, Log(self.chip.target.name, samples, rows, learned.floats, integers, grids)

    @functools.cached_property
    def _program(self) -> Any:
        """The compiled program: the outputs, integers and counts of a batch, and the facts that tracing it reveals."""

        def run(params: Any, reference: Any, inputs: Any) -> Any:
            computed = self.chip.run(params, inputs)
            given = computed.codes
            shared = self.reference.run(reference, inputs, given)
            alone = self.reference.run(reference, inputs).codes
            counts = {}
            for name, rounding in computed.roundings.items():
                other = shared.roundings[name]
                sites = _site(rounding, self.chip.target), _site(other, self.reference.target)
                counts[name] = _counts(*sites, given[name], codes(other.result))
                counts[name]["diverged"] = jnp.sum(given[name] != alone[name])
            return computed.outputs, given, counts, computed.learned

        # Counting is compiled once and run a few times: of what this saves, 7 s are left of 21 for MobileNetV2.
        return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})


def _row(name: str, node: Node, operators: str, factor_error: float, counts: dict[str, int]) -> RoundingRow:
    causes = {k.removeprefix(_CAUSE): v for k, v in counts.items() if k.startswith(_CAUSE) and v}
    fields = {k: v for k, v in counts.items() if not k.startswith(_CAUSE)}
    return RoundingRow(name, node.label, operators, factor_error=factor_error, causes=causes, **fields)


# --- One place where a tensor is rounded ---


@dataclasses.dataclass(frozen=True, eq=False)
class _Rounded:
    """The source of a rounding, the grid that it is rounded to, and the chip that rounds."""

    source: Any  # a Fixed, a Table or floats
    grid: Grid
    target: Target
    causes: frozenset[str] = frozenset()  # why that may be another number than the model's
    near: float = 0.0  # steps of the grid that the source may be off by

    @property
    def flat(self) -> Any:
        """The source with its array alone, in the order in which it lies."""
        if not isinstance(self.source, (Fixed, Table)):
            return layout.raw(self.source)
        source = self.source.replace(array=layout.raw(self.source.array))
        return (source.joined(self.grid) or source) if isinstance(source, Fixed) else source

    def plain(self, values: Array) -> Array:
        """One value for each of the source's elements, in ONNX's order."""
        array = self.source.array if isinstance(self.source, (Fixed, Table)) else self.source
        return layout.channels_first(values) if layout.is_last(array) else values

    @functools.cached_property
    def steps(self) -> Array:
        """The source in steps of the grid, as float32."""
        source, scale = self.flat, np.float32(self.grid.scale)
        if isinstance(source, Table):
            with np.errstate(all="ignore"):
                return source.look_up(np.asarray(source.values, np.float32) / scale)
        if not isinstance(source, Fixed):
            return source / scale
        v, ratio = source.integers().astype(jnp.float32), source.scale / self.grid.scale
        steps = v * float32(ratio)
        return steps if source.slope is None else jnp.where(v < 0, v * float32(ratio * source.slope), steps)

    def ties(self) -> Array:
        """Mask of the elements halfway between two integers."""
        source = self.flat
        if isinstance(source, Fixed):
            return ties(source, self.grid, self.target)
        return self.steps - jnp.floor(self.steps) == 0.5

    def saturated(self) -> Array:
        """Mask of the elements beyond the grid's ends that no activation cuts there."""
        source, (low, high) = self.flat, self.grid.ends
        if isinstance(source, Fixed):
            whole = None if unchanged(source, self.grid) else rescaled(source, self.grid, self.target)
            whole = source.array.astype(jnp.int32) if whole is None else whole
            ends = cut(source, self.grid, self.target)
            return ((whole < low) & (ends[0] <= low)) | ((whole > high) & (ends[1] >= high))
        return (self.steps < low - self.grid.zero - 0.5) | (self.steps > high - self.grid.zero + 0.5)

    def largest(self) -> Array:
        """The largest magnitude of the integers that are rounded."""
        source = self.flat
        if not isinstance(source, (Fixed, Table)):
            return jnp.zeros((), jnp.int32)
        fixed = source.source if isinstance(source, Table) else source
        return jnp.max(jnp.abs(fixed.integers()), initial=0)

    @functools.cached_property
    def inexact(self) -> Array:
        """Mask of the elements whose float32 sums may round to another integer, by the sum of all products' magnitudes.

        If scales are powers of two, those where that sum has more bits than float32 holds; otherwise those within the
        accumulated error of the float32 terms of a tie.
        """
        source = self.flat
        if not isinstance(source, Fixed) or (source.magnitude is None and source.is_dyadic):
            return jnp.zeros((), bool)
        if source.is_dyadic and self.source.bound * source.finest < 1 << FLOAT32_BITS:
            return jnp.zeros((), bool)
        sums = jnp.abs(source.integers()) if source.magnitude is None else source.magnitude()
        if source.is_dyadic:
            return sums * np.float32(source.finest) >= 1 << FLOAT32_BITS
        error = sums * float32(source.scale / self.grid.scale) * ((source.terms + 3) * 2.0**-FLOAT32_BITS)
        return jnp.abs(self.steps - jnp.floor(self.steps) - 0.5) <= error


def _site(rounding: Rounding, target: Target) -> _Rounded:
    """A rounding by a chip. What an integer operator of onnxruntime's rounds is within a half of what it gives."""
    source, grid, causes = rounding.source, rounding.grid, rounding.causes
    if source is None:
        return _Rounded(rounding.result.replace(coded=False), grid, target, causes, 0.5 + _NEAR)
    own = source.source if isinstance(source, Table) else source
    return _Rounded(source, grid, target, causes | own.causes if isinstance(own, Fixed) else causes)


def _counts(chip: _Rounded, ort: _Rounded, mine: Array, theirs: Array) -> dict[str, Array]:
    differs, tie = mine != theirs, chip.plain(chip.ties())
    counts = {
        "elements": jnp.int32(mine.size),
        "ties": jnp.sum(tie),
        "saturated": jnp.sum(chip.saturated()),
        "largest": chip.largest(),
        "inexact": jnp.sum(ort.plain(jnp.broadcast_to(ort.inexact, ort.steps.shape))),
        "differs": jnp.sum(differs),
    }
    left = differs
    for cause, applies in _causes(chip, ort, tie, mine):
        counts[f"{_CAUSE}{cause}"] = jnp.sum(left & applies)
        left = left & ~applies
    return counts


def _causes(chip: _Rounded, ort: _Rounded, tie: Array, mine: Array) -> Iterator[tuple[str, Array]]:
    """The causes that a difference can have here, and where each applies; the first that does counts."""
    one, other = chip.plain(chip.steps), ort.plain(ort.steps)
    near = jnp.abs(one - other) <= max(chip.near, ort.near) + _NEAR * jnp.maximum(jnp.abs(one), jnp.abs(other))
    # onnxruntime rounds in float32 where scales are no powers of two, and sums that are too long for it.
    loses = ort.plain(jnp.broadcast_to(ort.inexact | _in_float32(ort), ort.steps.shape))
    yield "tie", near & tie & ((chip.target.rounding != ort.target.rounding) | loses)
    if isinstance(chip.source, Fixed) and isinstance(ort.source, Fixed):
        ends, others = (cut(s.source, s.grid, s.target) for s in (chip, ort))
        at_end = functools.reduce(jnp.logical_or, (mine == e + chip.grid.middle for e in ends))
        beyond = one > min(ends[1], others[1]) - chip.grid.zero - 1
        yield "constant", near & (ends != others) & (at_end | beyond)
    if chip.causes:
        yield "+".join(sorted(chip.causes)), ~near | _other_integers(chip, ort) | (chip.near > 0)
    if chip.target.rounding == "floor":
        yield "rounding", near
    yield "float32", near & loses


def _other_integers(chip: _Rounded, ort: _Rounded) -> Array:
    """Where sums differ in bits that float32 does not see: those that a chip cuts off."""
    one, other = chip.flat, ort.flat
    if not (isinstance(one, Fixed) and isinstance(other, Fixed) and one.is_dyadic and other.is_dyadic):
        return jnp.zeros((), bool)
    finer = position(other.scale) - position(one.scale)
    if not 0 <= finer < 31:
        return jnp.zeros((), bool)
    return chip.plain((one.integers() << finer) != other.integers())


def _in_float32(site: _Rounded) -> bool:
    """Whether onnxruntime rounds more than sums here: quotients, functions, and scales that are no power of two."""
    source = site.source
    return site.near > 0 or not isinstance(source, Fixed) or not source.is_dyadic or source.slope is not None


def _operators(graph: Graph) -> dict[str, str]:
    """For each tensor of integers, the operators since the ones that it is made of."""
    operators: dict[str, str] = {}
    chains: dict[str, str] = {}
    for node in graph.nodes:
        if rounds(node):
            operators[node.outputs[0]] = chains.get(node.inputs[0], "") if is_pair(node) else node.op_type
        elif not is_pair(node):
            before = next((chains[i] for i in node.inputs if chains.get(i)), "")
            chains |= dict.fromkeys(node.outputs, f"{before}+{node.op_type}" if before else node.op_type)
    return operators
