"""Print the oldest version of each dependency that pyproject.toml claims, as pip takes them.

pip install $(python .ci/oldest.py)
"""

import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]

if __name__ == "__main__":
    oldest = [requirement.replace(">=", "==") for requirement in PROJECT["dependencies"]]
    print(*oldest, next(r for r in oldest if r.startswith("jax==")).replace("jax==", "jaxlib=="))
