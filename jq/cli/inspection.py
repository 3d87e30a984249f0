"""`jq-quant inspect`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import jq
from jq.cli.application import command
from jq.cli.options import shapes_of
from jq.cli.show import answer, table
from jq.errors import UnsupportedOp

if TYPE_CHECKING:
    from jq.evidence.inspection import Inspection


@command()
def inspect(
    model: Annotated[Path, typer.Argument(help="An ONNX file.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=1,3,224,224", help="Shape of an input with free dims, which are 1 otherwise; may be repeated."
        ),
    ] = None,
) -> None:
    """Show a model's interface, operators, parameters and MACs.

    MACs (multiply-accumulates) depend on the input shapes. Operators without a rule in jq are listed,
    and the command then exits with an error.

    Example: jq-quant inspect model.onnx --shape input=8,3,224,224

    Example: jq-quant inspect model_xint8.onnx --json
    """
    inspection = jq.inspect(jq.load(model), shapes_of(shape or ()))
    answer(as_json, inspection.to_dict(), *_parts(inspection, model.name))
    if inspection.unsupported:
        raise UnsupportedOp("; ".join(inspection.unsupported))


def _parts(inspection: Inspection, title: str) -> tuple[Any, ...]:
    macs: Mapping[str, int] = inspection.macs or {}
    sides = (("input", inspection.inputs), ("output", inspection.outputs))
    interface = [
        (side, v.name, " ".join([*v.containers, str(v.dtype or "?")]), _dims(v.shape))
        for side, values in sides
        for v in values
    ]
    ops = [(op, f"{count:,}", f"{macs[op]:,}" if op in macs else "") for op, count in inspection.ops.items()]
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in inspection.opsets.items())
    at = ", ".join(f"{name}={_dims(shape)}" for name, shape in inspection.shapes.items())
    total = f"unknown: {inspection.reason}" if inspection.total_macs is None else f"{inspection.total_macs:,} at {at}"
    return (
        table(("", "name", "type", "shape"), interface, title),
        table(("operator", "nodes", "MACs"), ops),
        f"opsets: {opsets}",
        f"parameters: {inspection.parameters:,} ({inspection.parameter_bytes:,} bytes)",
        f"MACs: {total}",
        *(f"unsupported: {line}" for line in inspection.unsupported),
    )


def _dims(shape: Sequence[int | str | None] | None) -> str:
    return "?" if shape is None else "[" + ",".join("?" if d is None else str(d) for d in shape) + "]"
