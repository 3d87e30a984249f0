"""The provider's options and its configuration file, for a chip and for what was made of a model.

Sources: amd/ryzen-ai-documentation 1.8.0, docs/modelrun.rst, for X1, X2 and BF16; Xilinx/ross-ai-assistant for INT8 with
float islands in BF16 (mixed), of Vitis AI 6.3. Nothing that these do not name is written, or accepted.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from jq.errors import ConfigError, check_choice, suggest
from jq.graph import Graph
from jq.graph.quantizers import is_quantized
from jq.graph.read import ModelLike, load
from jq.npu.facts import CHIPS
from jq.npu.units import units_of
from jq.ops.kinds import is_layer
from jq.util import files

Flow = Literal["X1", "X2", "BF16", "mixed"]
FLOWS: tuple[Flow, ...] = ("X1", "X2", "BF16", "mixed")
_STRIX = "stx"
DEVICES = (_STRIX, "ve2", "ve2-xc2ve3858")  # of `vaiml_config`: Strix and its like, and Versal AI Edge Gen 2
_STORAGE = ("auto", "vectorized", "unvectorized")
_LEVELS, _OPT_LEVELS = (1, 2, 3), (0, 1, 2, 3, 65536)

# Each documented key with the values that it may have; a type stands for all of its values.
PROVIDER_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {
        "config_file": str, "target": ("X1", "X2"), "xclbin": str, "opt_level": _OPT_LEVELS, "cache_dir": str,
        "cache_key": str, "enable_cache_file_io_in_mem": (0, 1), "ai_analyzer_visualization": bool,
        "ai_analyzer_profiling": bool, "encryption_key": str,
    }
)  # fmt: skip
VAIML_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {
        "optimize_level": _LEVELS, "preferred_data_storage": _STORAGE, "keep_outputs": bool,
        "enable_f32_to_bf16_conversion": bool, "device": DEVICES, "group_args": ("mixed_precision",),
        "threshold_gops_percent": int,
    }
)  # fmt: skip
_INIT = {"name": "init", "plugin": "vaip-pass_init"}
_PARTITION = {"name": "vaiml_partition", "plugin": "vaip-pass_vaiml_partition"}


@dataclasses.dataclass(frozen=True)
class ProviderConfig:
    """The options that a session with the provider is opened with, and the configuration file where it takes one."""

    flow: Flow
    options: Mapping[str, str]  # for onnxruntime's provider_options
    config: Mapping[str, Any]  # the content of vitisai_config.json
    notes: tuple[str, ...] = ()

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the configuration file."""
        files.write(path, json.dumps(self.config, indent=2) + "\n")


def provider_config(
    model: ModelLike | None = None,
    chip: str = "stx",
    backend: str | None = None,
    *,
    flow: Flow | None = None,
    device: str | None = None,
    xclbin: str | None = None,
    file: str = "vitisai_config.json",
    **options: Any,
) -> ProviderConfig:
    """Return the provider's options and its configuration file for a model on a chip.

    The flow is what was made of the model, if not given: `X1` or `X2` for integers, `mixed` where layers of a quantized
    model stay in float, `BF16` for a float model. For X1 and X2 the file holds the provider's options, as there is no other
    file; for BF16 and mixed, the passes of VAIML. `options` are documented ones of the provider and of `vaiml_config`.

    >>> provider_config(chip="phx").config["target"], dict(provider_config(flow="X2", opt_level=3).options)
    ('X1', {'target': 'X2', 'opt_level': '3'})
    >>> provider_config(flow="mixed", device="ve2").config["passes"][1]["vaiml_config"]["group_args"]
    'mixed_precision'
    """
    check_choice("chip", chip, CHIPS)
    hardware = CHIPS[chip]
    flow = flow or (backend if backend is not None else _flow(model, chip))  # type: ignore[assignment]
    check_choice("flow", flow, FLOWS)
    assert flow is not None
    if flow in ("BF16", "mixed"):
        if not hardware.bfloat16:
            raise ConfigError(f"chip {chip!r} has no BF16, which flow={flow!r} needs; use flow='X1' and XINT8")
        return _vaiml(flow, device or (_STRIX if flow == "mixed" else None), file, options)
    if flow not in hardware.backends:
        raise ConfigError(f"chip {chip!r} needs backend {' or '.join(hardware.backends)}; got {flow!r}")
    if device is not None:
        raise ConfigError(f"device is an option of flow='BF16' and flow='mixed'; got flow={flow!r}; leave it out")
    if xclbin is not None and not hardware.xclbin:
        raise ConfigError(f"xclbin must not be set on chip {chip!r}; leave it out")
    notes: tuple[str, ...] = ()
    if hardware.xclbin:
        notes = () if xclbin else (f"xclbin is relative to the installation of Ryzen AI: {hardware.xclbin}",)
        options = {"xclbin": xclbin or hardware.xclbin, **options}
    options = {"target": flow, **options}
    check_options("provider", options, PROVIDER_OPTIONS)
    return ProviderConfig(flow, _words(options), options, notes)


def check_config(config: Mapping[str, Any]) -> None:
    """Raise a ConfigError where a vitisai_config.json has what the documents do not name.

    >>> check_config(provider_config(flow="BF16").config)
    """
    if config.get("target") != "VAIML":
        check_options("provider", config, PROVIDER_OPTIONS)
        return
    check_options("file", config, {"passes": list, "target": ("VAIML",), "targets": list})
    passes = config.get("passes", [])
    names = [p.get("name") for p in passes if isinstance(p, dict)]
    wanted = [{"name": "VAIML", "pass": names}]
    if "vaiml_partition" not in names or config.get("targets") != wanted:
        raise ConfigError(
            f"targets need {json.dumps(wanted)}, with the pass vaiml_partition; got {config.get('targets')!r}"
        )
    for one in passes:
        known = {**_INIT, **_PARTITION}
        check_options("pass", one, {**dict.fromkeys(known, str), "vaiml_config": dict})
        check_options("vaiml_config", one.get("vaiml_config", {}), VAIML_OPTIONS)


def check_options(what: str, options: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise a ConfigError for an option that is not documented, or a value that it cannot have."""
    for name, value in options.items():
        if name not in known:
            raise ConfigError(
                f"{what}: no option {name!r} is documented.{suggest(name, known)} Available: {', '.join(known)}"
            )
        allowed = known[name]
        fits = isinstance(value, allowed) if isinstance(allowed, type) else value in allowed
        if not fits or (isinstance(value, bool) and allowed is not bool):
            expected = allowed.__name__ if isinstance(allowed, type) else ", ".join(map(str, allowed))
            raise ConfigError(f"{what}: {name} needs {expected}; got {value!r}")


def _flow(model: ModelLike | None, chip: str) -> str:
    """The flow for what was made of a model: by its quantizers, and by layers between them that are float."""
    if model is None:
        return CHIPS[chip].backends[0]
    graph = model if isinstance(model, Graph) else load(model)
    if not any(is_quantized(n) for n in graph.walk()):
        if not CHIPS[chip].bfloat16:
            raise ConfigError(f"the model is float, and chip {chip!r} has no BF16: quantize it to XINT8 first")
        return "BF16"
    floats = any(is_layer(n) for u in units_of(graph).units if not u.between for n in u.nodes)
    return "mixed" if floats and CHIPS[chip].bfloat16 else CHIPS[chip].backends[0]


def _vaiml(flow: Flow, device: str | None, file: str, given: Mapping[str, Any]) -> ProviderConfig:
    own = {k: v for k, v in given.items() if k in VAIML_OPTIONS}
    if flow == "mixed":
        vaiml = {
            "keep_outputs": True, "optimize_level": 2, "enable_f32_to_bf16_conversion": True, "device": device,
            "group_args": "mixed_precision", **own,
        }  # fmt: skip
    else:
        named = {} if device is None else {"device": device}
        vaiml = {"optimize_level": 1, "preferred_data_storage": "auto", **named, **own}
    check_options("vaiml_config", vaiml, VAIML_OPTIONS)
    config = {
        "passes": [dict(_INIT), {**_PARTITION, "vaiml_config": vaiml}],
        "target": "VAIML",
        "targets": [{"name": "VAIML", "pass": ["init", "vaiml_partition"]}],
    }
    options = {"config_file": file, **{k: v for k, v in given.items() if k not in VAIML_OPTIONS}}
    check_options("provider", options, PROVIDER_OPTIONS)
    if clash := options.keys() & {"target", "xclbin"}:
        raise ConfigError(f"flow={flow!r} takes its options from its file; leave out {', '.join(sorted(clash))}")
    return ProviderConfig(flow, _words(options), config)


def _words(options: Mapping[str, Any]) -> dict[str, str]:
    """Options as onnxruntime takes them: text."""
    return {k: str(int(v)) if isinstance(v, bool) else str(v) for k, v in options.items()}
