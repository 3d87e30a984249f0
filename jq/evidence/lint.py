"""Problems on the NPU or in 8 bits, found before quantizing.

A rule is one function of a graph and a config that yields findings; `rule` puts it in its file's table. Rules see the
graph simplified and in canonical form, so that what is folded away is no finding, unless they ask for an earlier one.
Repetitions are one finding with a count. To add a check, write one into `lint_model`, `lint_npu` or `lint_weights`;
what the provider aborts on is a row of a table in `lint_provider`.
"""

from __future__ import annotations

import os
from typing import get_args

from onnx import ModelProto

from jq.config import QuantConfig, resolve
from jq.evidence import lint_model, lint_npu, lint_provider, lint_weights
from jq.evidence.lint_rules import Finding, Severity
from jq.graph import Graph
from jq.graph.read import load
from jq.passes import simplify
from jq.passes.prepare import canonical, prepare
from jq.readings.diagnosis import blames_model

RULES = (*lint_model.RULES, *lint_npu.RULES, *lint_provider.RULES, *lint_weights.RULES)


@blames_model
def lint(
    model: str | os.PathLike[str] | bytes | ModelProto | Graph,
    config: QuantConfig | str = "XINT8",
    chip: str | None = None,
) -> list[Finding]:
    """Find problems before you quantize a model by a config: errors first, then warnings, then notes.

    With a chip (`phx`, `hpt`, `stx`, `krk`), formats that it does not take are findings, too.

    Nothing is run and no data are needed. Facts of the NPU are those of its documents and reference
    code, not measurements.

    >>> import jq.zoo
    >>> [f.rule for f in lint(jq.zoo.path("fashion_resnet")) if f.severity != "note"]
    []
    """
    options = resolve(config)
    loaded = model if isinstance(model, Graph) else load(model)
    simplified = prepare(loaded)
    prepared = simplified if options.strict_quark else simplify(canonical(simplified, options).graph)
    findings = [
        Finding(rule.name, f.severity or rule.severity, f.where, f.message)
        for rule in RULES
        for f in rule.check(loaded if rule.loaded else simplified if rule.decomposed else prepared, options)
    ]
    if chip is not None:
        findings += lint_provider.of_chip(loaded, options, chip)
    return sorted(findings, key=lambda f: get_args(Severity).index(f.severity))
