"""The pages: what can be checked without running them, and the script that runs them (CI runs it on all)."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "notebooks/README.md"]
sys.path.insert(0, str(ROOT / "docs"))

import walk  # noqa: E402  docs/ is no package

pytestmark = pytest.mark.every_case


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def slug(heading: str) -> str:
    """What forges call a heading in links."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        file, _, heading = target.partition("#")
        other = (page.parent / file).resolve() if file else page
        assert other.exists(), target
        headings = re.findall(r"^#+ (.*)", other.read_text(), re.MULTILINE) if heading else ()
        assert not heading or heading in map(slug, headings), target


@pytest.mark.parametrize("page", walk.pages(), ids=name_of)
def test_every_block_can_be_run(page: Path) -> None:
    for block in walk.blocks(page):
        assert block.language in ("python", "sh"), block
        if block.language == "python":
            ast.parse(block.code, str(block))


def test_the_marked_commands_are_there() -> None:
    marks = {b.mark: b.code for b in walk.blocks(ROOT / "README.md") if b.mark}
    assert marks.keys() == {"demo", "docs", "test"}
    assert "pytest" in marks["test"]


@pytest.mark.parametrize(
    ("text", "failed"),
    [
        ("```python\nx = 1\n```\n\n```python\nassert x == 1\n```\n", None),
        ("\n```python\nx = 1\nraise ValueError(x)\n```\n", "page.md:3 (python)"),
        ("```sh\ntest -f model.onnx && test -d calib && test -d images && test -f labels.csv\n```\n", None),
        ("```sh\njq-quant inspect no_such.onnx | cat\n```\n", "page.md:2 (sh)"),
        ("```ruby\nputs 1\n```\n", "page.md:2 (ruby)"),
        ("<!-- test -->\n```sh\nfalse\n```\n", None),
    ],
)
def test_a_page_runs_from_top_to_bottom(
    text: str, failed: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    monkeypatch.chdir(tmp_path)  # which is left for another folder, and comes back after the test
    lines, complete = walk.walk(page)
    assert complete == (failed is None)
    assert failed is None or f"FAILED {failed}" in lines


@pytest.mark.slow
@pytest.mark.parametrize("page", walk.pages(), ids=name_of)
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines, complete = walk.walk(page)
    assert complete, lines
