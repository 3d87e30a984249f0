"""Options that several commands share, and how their values are parsed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import jq
from jq.config import resolve
from jq.config_file import SUFFIXES, read_config, read_table
from jq.errors import ConfigError, Error
from jq.npu.facts import BACKENDS, CHIPS
from jq.readings.provider import provider_of
from jq.util import files
from jq.util.fields import declared
from jq.util.machine import cores


def beginning(known: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return the known words that begin with an incomplete one, for shell completion."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in known() if word.startswith(incomplete)]

    return complete


def node_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names and operators of the nodes, for shell completion, of the model that the command line has."""
    # Behind an option that still lacks its value, arguments are not parsed yet.
    given = ctx.params.get("model") or next((word for word in ctx.args if word.endswith(".onnx")), None)
    try:
        nodes = jq.load(given).nodes if given is not None else ()
    except Error:
        return []
    words = dict.fromkeys([*(n.label for n in nodes), *sorted({n.op_type for n in nodes})])
    return [word for word in words if word.startswith(incomplete)]


def settings(incomplete: str) -> list[str]:
    """Return the options of a config, for shell completion.

    >>> settings("weight_m")
    ['weight_method=']
    """
    return [f"{name}=" for name in declared(jq.QuantConfig) if name.startswith(incomplete)]


FloatModel = Annotated[Path, typer.Argument(help="A float ONNX file.", show_default=False)]
AnyModel = Annotated[Path, typer.Argument(help="An ONNX file, float or quantized.", show_default=False)]
Data = Annotated[
    Path | None,
    typer.Option(
        help="An .npz or .npy file, a folder of images or arrays, or FILE.py:FUNCTION, which returns samples [random data]."
    ),
]
Config = Annotated[
    str,
    typer.Option(
        help="A preset, or a .toml or .json file such as `quantize --show-config` prints.",
        autocompletion=beginning(lambda: jq.presets),
    ),
]
Reading = Annotated[
    str,
    typer.Option(
        help="Run the model by onnxruntime, one of its providers (cpu, vitisai, ...), jq in float32, or a target (ort, dpu, "
        "aie2_x1, aie2_even).",
        autocompletion=beginning(lambda: ("onnxruntime", "cpu", "vitisai", "jq", *jq.integer.TARGETS)),
    ),
]
ProviderOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="An option of the provider that --reading names, such as config_file; may be repeated.",
    ),
]
Context = Annotated[
    Path | None,
    typer.Option(
        "--ep-context",
        help="Save the compiled model in this .onnx file, and read it from there next time.",
        show_default=False,
    ),
]
Embed = Annotated[bool, typer.Option("--ep-context-embed", help="Embed the compiled code in that file.")]
Benchmark = Annotated[
    bool, typer.Option("--benchmark", help="Time 100 runs of one sample after 10 to warm up, for at most 20 seconds.")
]
LabelOffset = Annotated[
    int, typer.Option(help="Add this to each label: 1 if the model's first class is the background.")
]
Limit = Annotated[
    int | None,
    typer.Option(help="Use at most this many samples, or batches if the model has a fixed batch size [all]."),
]

Workers = Annotated[
    int | None,
    typer.Option(help="Distribute the work over this many processes on this machine [none: all in this one]."),
]
Chip = Annotated[str, typer.Option(help=f"The chip: {', '.join(CHIPS)}.", autocompletion=beginning(lambda: CHIPS))]
Backend = Annotated[str | None, typer.Option(help=f"{' or '.join(BACKENDS)} [the chip's first].", show_default=False)]
Stats = Annotated[
    Path | None,
    typer.Option(
        help="Use the statistics that `calibrate -o` wrote for this model and config, instead of calibrating again.",
        show_default=False,
    ),
]
Report = Annotated[Path | None, typer.Option(help="Write a report, .html or .json.")]


def use_all_cores() -> None:
    """One JAX device per core: a batch is split over them."""
    import jax

    with contextlib.suppress(RuntimeError):  # JAX runs already: then this is not the command line
        jax.config.update("jax_num_cpu_devices", cores())


@contextlib.contextmanager
def executor_of(workers: int | None) -> Iterator[jq.research.Processes | None]:
    """The processes that --workers asks for, until the block ends."""
    if workers is None:
        yield None
        return
    with jq.research.Processes(workers) as executor:
        yield executor


def check_output(option: str, path: Path | None, suffixes: Iterable[str]) -> None:
    """Raise a ConfigError, before any work, if a file with one of these endings cannot be written there."""
    if path is not None and path.suffix not in suffixes:
        raise ConfigError(f"{option} needs a name that ends in {' or '.join(suffixes)}; got {path}")
    files.check_writable(path)


def write_report(report: jq.Report, path: Path | None) -> list[str]:
    """Write a report as HTML or JSON, by the file's suffix; return the line that says where, if it is wanted."""
    if path is None:
        return []
    (report.to_html if path.suffix == ".html" else report.to_json)(path)
    return [f"report: {path}"]


_OVERRIDE = r"(.+)\s(\w+=.*)"  # a pattern, and an option with its value
_WORDS: Mapping[str, Any] = {
    "none": None,
    "yes": True,
    "no": False,
    "on": True,
    "off": False,
    "true": True,
    "false": False,
}


def decibels(text: str) -> float | None:
    """A number of dB, or off."""
    try:
        return None if text == "off" else float(text)
    except ValueError:
        raise ConfigError(f"--guard needs a number of dB, or off; got {text!r}") from None


def config_of(name: str, model: Path | None) -> jq.QuantConfig:
    """Return a preset by name, or the config in a TOML or JSON file; for AMD's JSON, as it applies to a model."""
    if not name.endswith(SUFFIXES):
        return resolve(name)
    from jq.compat.quark.json_config import is_quarks, quant_config  # with which `--help` would take longer

    table = read_table(name)
    if not is_quarks(table):
        return read_config(name)
    if model is None:
        raise ConfigError(f"{name} is a Quark config, which can only be read for a model; give the model, too")
    try:
        return quant_config(table, jq.load(model))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def reading_of(
    name: str, options: Iterable[str] | None, context: Path | None = None, embed: bool = False
) -> str | jq.Provider:
    """Return the reading that the options name, with those of its provider."""
    given: dict[str, str] = {}
    for text in options or ():
        option, equals, value = text.partition("=")
        if not equals or not option:
            raise ConfigError(f"--provider-option needs the form NAME=VALUE; got {text!r}")
        given[option] = value
    if not given and context is None and not embed:
        return name
    provider = provider_of(name)
    if provider is None:
        raise ConfigError(
            f"--provider-option and --ep-context need --reading with a provider of onnxruntime, such as vitisai; got {name!r}"
        )
    return jq.Provider(provider.name, given, context, embed)


def setting(text: str, option: str = "--set") -> tuple[str, Any]:
    """`NAME=VALUE`, with a value in JSON, or else in words: none, yes, no, a word, or several with commas between.

    >>> setting("finetune=none"), setting("cle=no"), setting("exclude=a,b"), setting("method=minmax")
    (('finetune', None), ('cle', False), ('exclude', ('a', 'b')), ('method', 'minmax'))
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{option} needs the form NAME=VALUE; got {text!r}")
    try:
        parsed = files.parsed(value)
    except ValueError:
        kind = declared(jq.QuantConfig).get(name, (str, None))[0]
        parsed = _WORDS.get(value.lower(), value)
        if isinstance(parsed, str) and "tuple[str, ...]" in str(kind) and value != "all":
            parsed = value.split(",")
    return name, jq.QuantConfig.read(name, parsed)


def overridden(config: jq.QuantConfig, options: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The overrides of a config with those of `--override PATTERN NAME=VALUE` behind them.

    >>> overridden(jq.QuantConfig(), ["conv* weight_method=minmax"])
    {'conv*': {'weight_method': 'minmax'}}
    """
    made = {pattern: dict(changed) for pattern, changed in config.overrides}
    for text in options:
        parts = re.fullmatch(_OVERRIDE, text, re.DOTALL)
        if parts is None:
            raise ConfigError(f"--override needs the form PATTERN NAME=VALUE; got {text!r}")
        name, value = setting(parts[2], "--override PATTERN")
        made.setdefault(parts[1], {})[name] = value
    return made


def paired(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with the two behind each --override as one, since options take one.

    >>> paired(["quantize", "--override", "conv*", "bias=float", "m.onnx"])
    ['quantize', '--override', 'conv* bias=float', 'm.onnx']
    """
    made: list[str] = []
    for word in words:
        open_pair = len(made) > 1 and made[-2] == "--override" and not re.fullmatch(_OVERRIDE, made[-1], re.DOTALL)
        if open_pair:
            made[-1] += f" {word}"
        else:
            made.append(word)
    return made


def shapes_of(options: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """`NAME=1,3,224,224` options; the name ends at the last =, and no dims are a scalar."""
    shapes = {}
    for option in options:
        name, equals, dims = option.rpartition("=")
        try:
            shapes[name] = tuple(int(d) for d in dims.split(",")) if dims else ()
        except ValueError:
            equals = ""
        if not equals or not name:
            raise ConfigError(f"--shape needs the form NAME=1,3,224,224; got {option!r}")
    return shapes
