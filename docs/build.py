"""Build the documentation into site/: these pages, and a reference of all public names from their docstrings.

    python docs/build.py

`notebooks/run.py` puts the notebooks beside them. A warning ends the build as an error does.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import shutil
import warnings
from pathlib import Path

import pdoc
from pdoc.render_helpers import to_html

import jq

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "site"
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**/*.md", "jq/zoo/README.md", "notebooks/README.md")
FILES = ("LICENSE", "docs/*.png")
# `jq` brings along all modules whose names are in its `__all__`: also of its functions, which hide them.
HIDDEN = "|".join(name for name in jq.__all__ if not inspect.ismodule(getattr(jq, name)))
MODULES = (
    "jq", rf"!jq\.({HIDDEN})(\.|$)", "jq.compat.quark", "jq.compat.vai_q_onnx",
)  # fmt: skip
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width"><style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
pre {{ overflow-x: auto; padding: .8rem; background: #8881; border-radius: 4px }}
table {{ border-collapse: collapse }} td, th {{ border: 1px solid #8884; padding: .2rem .6rem; text-align: left }}
img {{ max-width: 100% }}
</style><nav><a href="{up}index.html">jq</a> · <a href="{up}api/index.html">reference</a> ·
<a href="{up}notebooks/README.html">notebooks</a></nav>{body}</html>
"""


def where(source: Path) -> Path:
    """The page that is made of a file: of the first one, the index."""
    path = source.relative_to(ROOT)
    return SITE / ("index.html" if path.name == "README.md" and path.parent == Path() else path.with_suffix(".html"))


def link(source: Path, target: str) -> str:
    """A link of a page as it is in site/."""
    file, _, heading = target.partition("#")
    path = (source.parent / file).resolve() if file else source
    if path.is_dir():
        path /= "README.md"
    if path.suffix not in (".md", ".py"):
        return target
    return os.path.relpath(where(path), where(source).parent).replace(os.sep, "/") + (f"#{heading}" if heading else "")


def render(source: Path) -> str:
    """A page as HTML."""
    text = re.sub(r"<!-- \w+ -->\n", "", source.read_text())
    text = re.sub(r"(?<=\]\()(?!https?:)([^)\s]+)", lambda m: link(source, m[1]), text)
    up = "../" * len(where(source).relative_to(SITE).parents[:-1])
    return PAGE.format(title=text.splitlines()[0].strip("# "), up=up, body=to_html(text))


def main() -> None:
    """Build all of it."""
    warnings.simplefilter("error")
    for source in sorted(p for pattern in PAGES for p in ROOT.glob(pattern)):
        where(source).parent.mkdir(parents=True, exist_ok=True)
        where(source).write_text(render(source))
    for source in sorted(p for pattern in FILES for p in ROOT.glob(pattern)):
        shutil.copy(source, SITE / source.relative_to(ROOT))
    pdoc.render.configure(docformat="markdown", footer_text="")
    with contextlib.chdir(SITE / "docs"):  # where no folder is called like the package, of which pdoc would warn
        pdoc.pdoc(*MODULES, output_directory=SITE / "api")
    print(f"written: {SITE / 'index.html'}")


if __name__ == "__main__":
    main()
