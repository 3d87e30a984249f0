"""AMD's JSON of a Quark config, as the options that `jq.quantize` takes."""

from __future__ import annotations

import warnings
from typing import Any

from jq.compat.quark.inputs import Inputs
from jq.compat.quark.quantization.config.config import QConfig
from jq.compat.quark.translate import Translation, translate
from jq.config import QuantConfig
from jq.errors import ConfigError
from jq.graph import Graph


def is_quarks(document: Any) -> bool:
    """Return whether a document is a Quark config: it has settings for all layers.

    >>> is_quarks({"global_config": {}}), is_quarks({"preset": "XINT8"})
    (True, False)
    """
    return isinstance(document, dict) and "global_config" in document


def quant_config(document: Any, graph: Graph) -> QuantConfig:
    """Return the options of a Quark config for a float graph; what jq does in another way is a warning.

    Settings that `QuantConfig` lacks, such as another layout of the inputs, are a ConfigError: use `ModelQuantizer` for them.

    >>> import jq
    >>> spec = {"spec": "XInt8Spec"}
    >>> graph = jq.load(jq.zoo.path("fashion_resnet"))
    >>> quant_config({"global_config": {"input_tensors": spec, "weight": spec}}, graph).scale
    'power_of_two'
    """
    made = translate(QConfig.from_dict(document), graph)
    if left := list(_beside(made)):
        raise ConfigError(
            f"the Quark config asks for {', '.join(left)}, which a config cannot express; use "
            "jq.compat.quark.ModelQuantizer, which can"
        )
    for note in made.notes:
        warnings.warn(note, stacklevel=2)
    return made.config


def _beside(made: Translation) -> list[str]:
    """Return in words what a translation holds beside the config."""
    plain = Inputs(made.inputs.values, random=made.inputs.random)
    asked = {
        "another form of the model": made.graph is not None,
        "other calibration data": made.inputs != plain,
        f"the format {made.format}": made.format != "qdq",
        f"opset {made.opset}": made.opset is not None,
        "statistics in a file": made.ranges_file is not None,
        "a folder for activations that do not fit in memory": made.spill is not None,
        "weights in a separate file": made.external,
    }
    return [name for name, value in asked.items() if value]
