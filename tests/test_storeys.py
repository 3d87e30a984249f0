"""The architecture: a module imports only what stands above it, and no name hides another."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import jq

pytestmark = pytest.mark.every_case

ROOT = Path(jq.__file__).parent
# From top to bottom. Of an entry with a dot, the longest one that a module begins with counts: `npu` and `plan` hold
# data, which operators may name, and rules about graphs, which stand where a graph can be read.
STOREYS = (
    ("errors", "version", "util"),
    ("graph",),
    ("arithmetic", "data"),
    ("plan",),
    ("npu.facts", "npu.targets"),
    ("ops",),
    (
        "npu.rewrites",
        "npu.units",
        "npu.xir",
        "npu.pieces",
        "npu.placing",
        "npu.changes",
        "device.provider",
        "device.provider_report",
        "device.report_file",
    ),
    ("readings",),
    ("config", "config_file"),
    ("plan.heads", "plan.selection", "plan.placement"),
    ("passes",),
    ("calibration",),
    ("plan.ranges", "plan.scales", "plan.forms", "plan.outputs", "npu.shifts", "npu.constraints", "plan.planning"),
    ("recovery",),
    ("exchange",),
    ("evidence",),
    ("pipeline",),
    ("device.remade", "device.advising", "device.forecasting"),
    ("evaluation",),
    ("device.reporting",),
    ("zoo",),
    ("research",),
    ("testing", "compat", "cli"),
)
STOREY = {name: number for number, names in enumerate(STOREYS) for name in names}
MODULES = [m.name for m in pkgutil.walk_packages([str(ROOT)], "jq.") if not m.name.startswith("jq.compat.quark")]


def storey(module: str) -> int:
    """The number of a module's storey."""
    parts = module.split(".")[1:]
    known = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next(STOREY[name] for name in known if name in STOREY)


def imports(module: str) -> Iterator[str]:
    """The modules of this package that a module names, inside functions too, but not for the type checker alone."""
    tree = ast.parse(Path(str(importlib.import_module(module).__file__)).read_text())
    for block in [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]:
        block.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("jq"):
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                yield below if below in MODULES else str(node.module)


@pytest.mark.parametrize("module", [m for m in MODULES if m != "jq.__main__"])
def test_a_module_imports_only_what_stands_above_it(module):
    below = [name for name in imports(module) if name != "jq" and storey(name) > storey(module)]
    assert not below, f"{module} is in storey {STOREYS[storey(module)]}"


@pytest.mark.parametrize("module", [m for m in MODULES if not m.startswith("jq.compat") and m != "jq.__main__"])
def test_no_module_is_hidden_or_named_like_one_of_the_standard_library(module):
    package, _, name = module.rpartition(".")
    assert getattr(importlib.import_module(package), name) is importlib.import_module(module)
    assert name not in sys.stdlib_module_names
