"""`jq-quant inspect`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import jq
from jq.cli.application import command
from jq.cli.options import shapes_of
from jq.cli.show import show, table
from jq.errors import UnsupportedOp

if TYPE_CHECKING:
    from jq.inspect import Inspection


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

    MACs (multiply-accumulates) hang on shapes, so on those of the inputs. Operators that jq has no rule for are listed,
    and are an error after that.

    Example: jq-quant inspect model.onnx --shape input=8,3,224,224

    Example: jq-quant inspect model_xint8.onnx --json
    """
    found = jq.inspect(jq.load(model), shapes_of(shape or ()))
    if as_json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        _show(found, model.name)
    if found.unsupported:
        raise UnsupportedOp("; ".join(found.unsupported))


def _show(found: Inspection, title: str) -> None:
    macs: Mapping[str, int] = found.macs or {}
    sides = (("input", found.inputs), ("output", found.outputs))
    interface = [
        (side, v.name, " ".join([*v.containers, str(v.dtype or "?")]), _dims(v.shape))
        for side, values in sides
        for v in values
    ]
    ops = [(op, f"{count:,}", f"{macs[op]:,}" if op in macs else "") for op, count in found.ops.items()]
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in found.opsets.items())
    at = ", ".join(f"{name}={_dims(shape)}" for name, shape in found.shapes.items())
    total = f"unknown: {found.reason}" if found.total_macs is None else f"{found.total_macs:,} at {at}"
    show(
        table(("", "name", "type", "shape"), interface, title),
        table(("operator", "nodes", "MACs"), ops),
        f"opsets: {opsets}",
        f"parameters: {found.parameters:,} ({found.parameter_bytes:,} bytes)",
        f"MACs: {total}",
        *(f"unsupported: {line}" for line in found.unsupported),
    )


def _dims(shape: Sequence[int | str | None] | None) -> str:
    return "?" if shape is None else "[" + ",".join("?" if d is None else str(d) for d in shape) + "]"
