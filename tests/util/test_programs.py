"""Programs on disk: traced once for all processes, and whatever happens to a file, results are right."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jq.util import programs

X = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where programs are kept, empty at first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JQ_CACHE", raising=False)
    return programs.folder()


class Counted:
    """A function of a tree, and how often it was traced."""

    def __init__(self) -> None:
        self.traced = 0

    def __call__(self, given: Any, factor: Any) -> dict[str, Any]:
        self.traced += 1
        return {"sum": given["x"].sum(0) * factor, "each": (given["x"] - factor,)}


def ran(function: Callable[..., Any], key: str | None, x: np.ndarray = X, factor: float = 2) -> Any:
    given = {"x": x}, np.float32(factor)
    with ThreadPoolExecutor(1) as pool:
        program, like = programs.compiled(key, function, given, pool, None)
    made = program(*given)
    assert jax.tree.map(np.shape, made) == jax.tree.map(lambda v: v.shape, like)
    return made


def check(made: Any, x: np.ndarray = X, factor: float = 2) -> None:
    np.testing.assert_array_equal(made["sum"], x.sum(0) * factor)
    np.testing.assert_array_equal(made["each"][0], x - factor)


def test_a_program_is_traced_once_for_a_key(folder: Path) -> None:
    first, second = Counted(), Counted()
    check(ran(first, "a"))
    check(ran(second, "a", X + 1, 3), X + 1, 3)
    assert (first.traced, second.traced) == (1, 0) and len(os.listdir(folder)) == 1


@pytest.mark.parametrize("other", ["key", "shape", "type", "precision", "package"])
def test_all_that_a_program_depends_on_is_in_its_name(
    folder: Path, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran(Counted(), "a")
    again, x = Counted(), {"shape": X[:2], "type": X.astype(np.int32)}.get(other, X)
    if other == "package":
        monkeypatch.setattr(programs, "_package", lambda: "another version of the source")
    with jax.default_matmul_precision("highest" if other == "precision" else "default"):
        check(ran(again, "b" if other == "key" else "a", x), x)
    assert again.traced == 1


@pytest.mark.parametrize("damage", ["empty", "cut", "bit", "other"])
def test_a_damaged_file_is_a_program_that_is_not_there(folder: Path, damage: str) -> None:
    ran(Counted(), "a")
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    file.write_bytes(
        {"empty": b"", "cut": whole[:-1], "bit": bytes(flipped), "other": b"a text of another program"}[damage]
    )
    again, after = Counted(), Counted()
    check(ran(again, "a"))
    check(ran(after, "a"))
    assert (again.traced, after.traced) == (1, 0)


def test_nothing_is_kept_without_a_key_or_a_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(ran(Counted(), None))
    monkeypatch.setenv("JQ_CACHE", "off")
    check(ran(Counted(), "a"))
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("a file where a folder should be")
    check(ran(Counted(), "a"))


def test_what_calls_the_host_is_not_kept(folder: Path) -> None:
    def calling(given: Any, factor: Any) -> Any:
        shape = jax.ShapeDtypeStruct(given["x"].shape, jnp.float32)
        return {"sum": jax.pure_callback(lambda x: np.asarray(x) + 1, shape, given["x"]) * factor}

    np.testing.assert_array_equal(ran(calling, "a")["sum"], (X + 1) * 2)
    assert not folder.exists()


def test_the_longest_unused_go_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for age, key in enumerate("cba"):
        ran(Counted(), key)
        for file in folder.iterdir():
            os.utime(file, (file.stat().st_atime, file.stat().st_mtime - 10 * (age + 1)))
    monkeypatch.setattr(programs, "LIMIT", 3 * max(f.stat().st_size for f in folder.iterdir()))
    ran(Counted(), "d")
    kept = {key: Counted() for key in "abdc"}  # what is made anew, last
    for key, function in kept.items():
        ran(function, key)
    assert [kept[key].traced for key in "abd"] == [0, 0, 0] and kept["c"].traced == 1


@pytest.mark.parametrize("kind", ["int4", "uint4", "int2", "uint2"])
def test_arguments_of_less_than_a_byte(kind: str, folder: Path) -> None:
    x = jnp.array([[0, 1], [1, 0]], kind)
    with ThreadPoolExecutor(1) as pool:
        program, _ = programs.compiled(None, lambda v: v.astype(jnp.float32) * (v.dtype == kind), (x,), pool, None)
        np.testing.assert_array_equal(program(x), [[0, 1], [1, 0]])
