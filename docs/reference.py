"""The pages of the reference that are made from the code: options, presets, commands, Quark's options, public names."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import typer

import jq
from jq.cli import app
from jq.cli.application import GROUPS
from jq.cli.presets import chip, cost, sentence
from jq.compat.quark.rows import NAMES, TOOLS, rows
from jq.config import QuantConfig
from jq.util.fields import declared

# The public names, each on one page.
PAGES: Mapping[str, Sequence[str]] = {
    "quantize": (
        "quantize", "Result", "auto", "AutoResult", "compare", "Report", "lint", "Finding", "inspect", "infer", "benchmark",
        "Timing", "convert", "preprocess", "presets", "QuantConfig",
    ),
    "steps": (
        "load", "prepare", "calibrate", "Stats", "equalize", "make_plan", "Plan", "QParams", "correct_biases", "finetune",
        "fake_quant", "FakeQuant", "trace", "Traced", "export", "activation_qparams", "activation_ranges",
        "weight_qparams", "pack", "chunked", "open_reading", "Provider", "split_quantizers",
    ),
    "graphs": ("Graph", "Node", "Value", "save", "to_model"),
    "errors": ("Error", "ModelError", "DataError", "ConfigError", "UnsupportedOp"),
}  # fmt: skip
TITLES = {
    "quantize": "Quantize and inspect", "steps": "Step by step", "graphs": "Graphs and files", "errors": "Errors"
}  # fmt: skip
# The sections of the page of options, by the first option of each.
SECTIONS = {
    "scale": "Formats and scales", "op_types": "Which nodes are quantized", "weights_only": "Changes to the graph",
    "cle": "Accuracy", "finetune": "Finetuning", "percentile": "Calibration",
}  # fmt: skip
MODULES = tuple(name for name in jq.__all__ if inspect.ismodule(getattr(jq, name)))


def pages() -> dict[str, str]:
    """The pages by their names."""
    made = {"options": options(), "presets": presets(), "commands": commands(), "compat": compat()}
    made |= {
        f"api_{page}": api(TITLES[page], {f"jq.{n}": getattr(jq, n) for n in names}) for page, names in PAGES.items()
    }
    made |= {f"api_{name}": module(name) for name in MODULES}
    return made


def table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    cells = [columns, ["---"] * len(columns), *lines]
    return "\n".join("| " + " | ".join(" ".join(c.split()).replace("|", "\\|") for c in line) + " |" for line in cells)


def options() -> str:
    """All fields of `QuantConfig`: what each does, what it may hold, and its default."""
    default = QuantConfig().to_dict()
    lines = [
        (f"## {SECTIONS[name]}\n\n" if name in SECTIONS else "")
        + f"### `{name}`\n\n{own.text[0].upper()}{own.text[1:]}.\n\n*Takes* {_plain(own.words(kind))}. "
        f"*Default:* `{_short(default[name])}`." + ("\n\nIt can be overridden for some nodes." if own.local else "")
        for name, (kind, own) in declared(QuantConfig).items()
    ]
    head = (
        "# Options\n\nThese are the fields of `jq.QuantConfig`. A preset is one of its values, and `replace` returns a changed "
        'copy: `jq.presets["XINT8"].replace(method="nonoverflow")`. On the command line, set an option with '
        "`--set method=nonoverflow`, or edit the file that `--show-config` prints. `help(jq.QuantConfig)` has the same texts.\n"
    )
    return "\n\n".join([head, *lines]) + "\n"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 90 else f"{text[:80]} ..."


def _plain(words: str) -> str:
    return words.replace("*", r"\*").replace("_", r"\_")


def presets() -> str:
    """What each preset is, the chip that it is for and its cost."""
    lines = [(f"`{name}`", sentence(c), chip(c), cost(c)) for name, c in jq.presets.items()]
    head = (
        "# Presets\n\nThe names are Quark's, with or without `_CONFIG`. `jq-quant presets` prints this table, and "
        "`jq-quant quantize --config NAME --show-config` all [options](options.md) of one.\n\n"
    )
    return head + table(("preset", "description", "chip", "cost on a MobileNet"), lines) + "\n"


def commands() -> str:
    """Every command with its help and its options."""
    group: Any = typer.main.get_command(app)
    parts = ["# Command line\n\n`jq-quant COMMAND`, or `python -m jq COMMAND`. " + _text(group.epilog or "")]
    for title, names in GROUPS.items():
        parts.append(f"## {title}")
        parts += [_command(name, group.commands[name]) for name in names]
    return "\n\n".join(parts) + "\n"


def _command(name: str, made: Any) -> str:
    examples, text = [], []
    for paragraph in inspect.cleandoc(made.help or "").split("\n\n"):
        line = " ".join(paragraph.split())
        if line.startswith("Example: "):
            examples.append(line.removeprefix("Example: "))
        else:
            text.append(line)
    shown = [p for p in made.params if not getattr(p, "hidden", False)]
    lines = [(_spelled(p), _text(getattr(p, "help", None) or "")) for p in shown if p.name not in ("quiet", "verbose")]
    parts = [f"### `jq-quant {name}`", *text]
    parts += ["```sh\n" + "\n".join(examples) + "\n```"] if examples else []
    return "\n\n".join([*parts, table(("argument", "meaning"), lines)])


def _spelled(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    names = [*parameter.opts, *parameter.secondary_opts]
    value = "" if parameter.is_flag else f" {parameter.metavar or 'VALUE'}"
    return f"`{', '.join(names)}{value}`"


def _text(words: str) -> str:
    return " ".join(words.split()).replace("<", "&lt;").replace("*", r"\*")


def compat() -> str:
    """What becomes of each option, tool and name of Quark's."""
    parts = [
        "# Quark's options\n\nEach row says what an option of AMD Quark 0.13 does in `jq.compat.quark`, or why it is not "
        "supported. An unsupported option raises an error if you use it, and one that `jq` serves in another way gives a "
        "warning. See [Come from Quark](../guides/come_from_quark.md)."
    ]
    for title, lines in rows().items():
        parts += [f"## {title}", table(("option", "in jq"), [(f"`{k}`", _text(v)) for k, v in lines.items()])]
    tools = [(f"`{name}`", _text(text)) for name, text in TOOLS.items()]
    parts += ["## Tools, `python -m jq.compat.quark.tools.NAME`", table(("tool", "in jq"), tools)]
    parts += [
        "## Names that are not here",
        table(("name", "instead"), [(f"`{k}`", _text(v)) for k, v in NAMES.items()]),
    ]
    return "\n\n".join(parts) + "\n"


def module(name: str) -> str:
    """The public names of a module."""
    made = getattr(jq, name)
    names = getattr(made, "__all__", None) or [n for n in dir(made) if not n.startswith("_") and _own(made, n)]
    text = inspect.getdoc(made) or ""
    return api(f"jq.{name}", {f"jq.{name}.{n}": getattr(made, n) for n in names}, text)


def _own(made: Any, name: str) -> bool:
    home = getattr(getattr(made, name), "__module__", None)
    return isinstance(home, str) and home.startswith(made.__name__)


def api(title: str, objects: Mapping[str, Any], text: str = "") -> str:
    """A page of public names."""
    parts = [f"# {title}", text]
    for name, value in objects.items():
        if value is QuantConfig:
            parts += [f"## {name}", "The options of a quantization, with their texts: see [Options](options.md)."]
        elif inspect.isfunction(value) or inspect.isclass(value):
            label = f"      heading: {name}\n      toc_label: {name}"
            parts.append(f"::: {value.__module__}.{value.__qualname__}\n    options:\n{label}")
        else:
            parts += [f"## {name}", _mapping(value) if isinstance(value, Mapping) else f"A constant: `{_short(value)}`"]
    return "\n\n".join(part for part in parts if part) + "\n"


def _mapping(value: Mapping[Any, Any]) -> str:
    return "A mapping: " + ", ".join(f"`{key}`" for key in value) + "."
