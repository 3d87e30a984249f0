"""Build the documentation into site/ with mkdocs: these pages, the notebooks, and a reference made from the code.

    python docs/build.py

Sources are gathered in build/docs, where their links are those of the site. Notebooks stand there as `notebooks/run.py`
leaves them in build/notebooks, with what they show; those that were not run, without. A page that no menu reaches, a link
that leads nowhere or any other warning ends the build as an error does.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES, EXECUTED = ROOT / "build/docs", ROOT / "build/notebooks"
# Pages outside of docs/, and where they stand in the site.
ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "jq/zoo/README.md": "zoo.md",
    "notebooks/README.md": "notebooks/index.md",
}
FILES = ("*.png", "*.svg", "*.css", "*.js", "*.cast")
REPOSITORY = "https://github.com/jq-quant/jq/blob/main"


def placed(source: Path) -> Path | None:
    """The place of a file in the site's sources, or None for a file that is not part of the site."""
    path = source.relative_to(ROOT)
    if path.as_posix() in ELSEWHERE:
        return Path(ELSEWHERE[path.as_posix()])
    if path.parts[0] == "docs" and any(path.match(p) for p in ("*.md", *FILES)):
        return path.relative_to("docs")
    if path.parent == Path("notebooks") and path.suffix == ".py" and path.name != "run.py":
        return path.with_suffix(".ipynb")
    return None


def link(source: Path, target: str) -> str:
    """A link of a page as the site has it: to another page, or to the repository."""
    file, mark, heading = target.partition("#")
    if not file:
        return target
    path = (source.parent / file).resolve()
    path = path / "README.md" if (path / "README.md").exists() else path
    place = placed(path)
    if place is None:
        return f"{REPOSITORY}/{path.relative_to(ROOT).as_posix()}{mark}{heading}"
    here = placed(source)
    assert here is not None
    return os.path.relpath(place, here.parent).replace(os.sep, "/") + mark + heading


def page(source: Path) -> str:
    """A page of the site: links as they are there, and no marks for CI."""
    text = re.sub(r"<!-- \w+ -->\n", "", source.read_text())
    return re.sub(r"(?<=\]\()(?!https?:)([^)\s]+)", lambda m: link(source, m[1]), text)


def notebook(source: Path) -> str:
    """A notebook with what it shows, if it was run."""
    import jupytext

    executed = EXECUTED / f"{source.stem}.ipynb"
    text: str = executed.read_text() if executed.exists() else jupytext.writes(jupytext.read(source), fmt="ipynb")
    return text


def gather() -> None:
    """Lay out the sources of the site."""
    import reference

    shutil.rmtree(SOURCES, ignore_errors=True)
    found = [ROOT / name for name in ELSEWHERE]
    found += [p for p in ROOT.glob("docs/**/*") if p.is_file() and placed(p)]
    found += [p for p in ROOT.glob("notebooks/*.py") if placed(p)]
    for source in sorted(found):
        place = placed(source)
        assert place is not None
        target = SOURCES / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            target.write_text(page(source))
        elif source.suffix == ".py":
            target.write_text(notebook(source))
        else:
            shutil.copy(source, target)
    (SOURCES / "reference").mkdir()
    for name, text in reference.pages().items():
        (SOURCES / f"reference/{name}.md").write_text(text)


def main() -> None:
    """Build all of it."""
    sys.path.insert(0, str(ROOT / "docs"))
    gather()
    made = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--clean", "-f", str(ROOT / "mkdocs.yml")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # it is no warning about these pages
    if code := subprocess.run(made, cwd=ROOT, env=environment, check=False).returncode:
        raise SystemExit(code)
    print(f"written: {ROOT / 'site/index.html'}")


if __name__ == "__main__":
    main()
