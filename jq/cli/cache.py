"""`jq-quant cache`: show and clear what is kept on disk between runs."""

from __future__ import annotations

from typing import Annotated

import typer

from jq.cli.application import command
from jq.cli.show import answer, table


@command()
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove everything in it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show the size of the compilation cache on disk, or clear it.

    Example: jq-quant cache

    Example: jq-quant cache --clear
    """
    from jq.util import cache as compilations
    from jq.util import programs

    kinds = {
        "compilations": (compilations.folder(), compilations.LIMIT),
        "programs": (programs.folder(), programs.LIMIT),
    }
    rows = [
        (kind, str(where), compilations.trim(where, 0 if clear else limit)) for kind, (where, limit) in kinds.items()
    ]
    document = [dict(zip(("kind", "folder", "bytes"), row, strict=True)) for row in rows]
    shown = [(kind, folder, f"{size / 1e6:.1f} MB") for kind, folder, size in rows]
    answer(as_json, document, table(("kept", "folder", "size"), shown))
