"""The ONNX backend suite as a ratchet: what passed once must pass, what newly passes must be listed."""

from __future__ import annotations

import re

import pytest

import jq
from tests.onnx_backend import suite

# onnx draws a new release's cases anew, so the list holds for the release that it was made with.
MADE_WITH = "1.23"


@pytest.mark.parametrize("name", sorted(suite.cases()))
def test_case(name: str) -> None:
    listed, of_list = name in suite.passing(), suite.onnx.__version__.startswith(MADE_WITH)
    try:
        suite.check(suite.cases()[name])
    except (jq.Error, AssertionError) as error:
        if listed and (of_list or isinstance(error, jq.Error)):
            raise
        pytest.skip("another release of onnx expects other numbers" if listed else "not on the list of passing cases")
    if of_list and not listed:
        pytest.fail("passes: add it with `python -m tests.onnx_backend.suite --update`")


def test_the_list_keeps_its_promises() -> None:
    """At least 1,450 cases, and all of the kinds that quantized networks rest on."""
    listed = suite.passing()
    assert len(listed) >= 1950
    if not suite.onnx.__version__.startswith(MADE_WITH):
        return
    quantized = re.compile(r"quantize|qlinear|integer", re.IGNORECASE)
    for name in suite.cases():
        if not name.startswith(("node/", "simple/")) or quantized.search(name):
            assert name in listed
