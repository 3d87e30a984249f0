"""Which nodes are quantized: by operator, by name and pattern, and by where they stand."""

from __future__ import annotations

from typing import Any

import pytest

import jq
from jq.config import QuantConfig, presets
from jq.graph import Graph
from jq.passes.prepare import prepare
from jq.plan import Plan
from jq.plan.selection import check_names, selected
from jq.readings.fake import as_planned
from tests.passes.models import build, node, normal

# stem - left.0 - left.1 - join - head - last, with a second branch from stem to join: right
NODES = [
    node("Conv", ["x", "w"], ["a"], name="stem"),
    node("Conv", ["a", "w"], ["b"], name="left.0"),
    node("Exp", ["b"], ["c"], name="left.1"),
    node("Sigmoid", ["a"], ["d"], name="right"),
    node("Add", ["c", "d"], ["e"], name="join"),
    node("Conv", ["e", "w"], ["f"], name="head"),
    node("Softmax", ["f"], ["y"], name="last"),
]
LABELS = {n.output[0]: n.name for n in NODES}
ALL = "stem left.0 left.1 right join head last"


@pytest.fixture(scope="module")
def graph() -> Graph:
    return jq.load(build(NODES, {"w": normal(4, 4, 1, 1)}))


def chosen(graph: Graph, **options: Any) -> str:
    """The names of the nodes that are quantized, in their order."""
    config = QuantConfig(**{"op_types": None, **options})
    check_names(graph, config)
    found = selected(graph, config)
    return " ".join(name for output, name in LABELS.items() if output in found)


def test_all_and_those_of_the_vendor(graph: Graph) -> None:
    assert chosen(graph) == ALL
    assert selected(graph, presets["VINT8"]) == set(LABELS)
    assert selected(graph, presets["XINT8"]) == set(LABELS) - {"c"}  # Exp


def test_by_operator(graph: Graph) -> None:
    assert chosen(graph, op_types=("Conv",)) == "stem left.0 head"
    assert chosen(graph, op_types=("Conv", "Softmax")) == "stem left.0 head last"
    assert chosen(graph, op_types=()) == ""
    assert chosen(graph, op_types=("Gemm",)) == ""  # none is there, which is no mistake


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        (("stem",), "left.0 left.1 right join head last"),
        (("left.*",), "stem right join head last"),
        (("left.[1-9]",), "stem left.0 right join head last"),
        (("?????",), "stem left.0 left.1 join head last"),
        (("Conv",), "left.1 right join last"),
        (("Conv", "right", "l*"), "join"),
        (("*",), ""),
    ],
)
def test_exclusion_by_name_pattern_and_operator(graph: Graph, exclude: tuple[str, ...], left: str) -> None:
    assert chosen(graph, exclude=exclude) == left


def test_patterns_are_of_names_and_not_of_operators(graph: Graph) -> None:
    with pytest.raises(jq.ConfigError, match=r"'Con\*' matches no node, by name or operator"):
        chosen(graph, exclude=("Con*",))


@pytest.mark.parametrize(
    ("starts", "ends", "left"),
    [
        (("left.0",), ("join",), "stem right head last"),
        (("stem",), ("join",), "head last"),
        (("left.0",), ("left.1",), "stem right join head last"),
        (("left.0", "right"), ("join",), "stem head last"),
        (("join",), ("left.0",), ALL),  # nothing lies between
        (("head",), ("head",), "stem left.0 left.1 right join last"),
    ],
)
def test_exclusion_of_subgraphs(graph: Graph, starts: tuple[str, ...], ends: tuple[str, ...], left: str) -> None:
    assert chosen(graph, exclude_subgraphs=((starts, ends),)) == left


def test_exclusion_of_several_subgraphs(graph: Graph) -> None:
    assert (
        chosen(graph, exclude_subgraphs=((("stem",), ("stem",)), (("head",), ("last",)))) == "left.0 left.1 right join"
    )


@pytest.mark.parametrize(
    ("inputs", "outputs", "left"),
    [
        (("left.0",), (), "left.0 left.1 join head last"),
        ((), ("join",), "stem left.0 left.1 right join"),
        (("left.0",), ("join",), "left.0 left.1 join"),
        (("left.0", "right"), ("head",), "left.0 left.1 right join head"),
        ((), ("left.1", "right"), "stem left.0 left.1 right"),
        (("last",), (), "last"),
        (("head",), ("stem",), ""),
    ],
)
def test_first_and_last_nodes(graph: Graph, inputs: tuple[str, ...], outputs: tuple[str, ...], left: str) -> None:
    assert chosen(graph, input_nodes=inputs, output_nodes=outputs) == left


def test_all_limits_hold_together(graph: Graph) -> None:
    options = {
        "op_types": ("Conv", "Add", "Softmax"),
        "input_nodes": ("stem",),
        "output_nodes": ("head",),
        "exclude": ("left.*",),
        "exclude_subgraphs": ((("join",), ("join",)),),
    }
    assert chosen(graph, **options) == "stem head"


@pytest.mark.parametrize(
    ("options", "near"),
    [
        ({"exclude": ("stam",)}, "stem"),
        ({"exclude": ("Conf",)}, "Conv"),
        ({"overrides": {"haed": {"bias": "float"}}}, "head"),
        ({"input_nodes": ("left.2",)}, "left"),
        ({"output_nodes": ("lost",)}, "last"),
        ({"exclude_subgraphs": ((("stem",), ("joint",)),)}, "join"),
    ],
)
def test_names_that_no_node_has(graph: Graph, options: dict[str, Any], near: str) -> None:
    with pytest.raises(jq.ConfigError, match=f"Did you mean '{near}"):
        chosen(graph, **options)
    with pytest.raises(jq.ConfigError, match=f"Did you mean '{near}"):
        prepare(graph, QuantConfig(**options))


def test_patterns_and_operators_of_overrides(graph: Graph) -> None:
    overrides = {"left.*": {"bias": "float"}, "Softmax": {"bias": "float"}}
    assert chosen(graph, overrides=overrides) == ALL
    with pytest.raises(jq.ConfigError, match=r"'right\.\*'"):
        chosen(graph, overrides={"right.*": {"bias": "float"}})


def test_excluded_nodes_are_not_rewritten(graph: Graph) -> None:
    def ops(**options: Any) -> list[str]:
        config = QuantConfig(**options)
        prepared = prepare(graph, config)
        plan = Plan({}, {}, selected(prepared, config), config.forms)
        return [n.op_type for n in as_planned(prepared, plan).nodes]

    assert "HardSigmoid" in ops() and "Sigmoid" not in ops()
    for options in ({"exclude": ("right",)}, {"exclude": ("Sigmoid",)}, {"op_types": ("Conv",)}, {"forms": ()}):
        assert "Sigmoid" in ops(**options) and "HardSigmoid" not in ops(**options)
