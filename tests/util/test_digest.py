"""The identity of values: equal where all that counts is equal, and nowhere else."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnx
import pytest

import jq
from jq.arithmetic.formats import INT8
from jq.graph import Node
from jq.util.digest import digest


@dataclasses.dataclass(frozen=True)
class Scaled:
    by: float
    note: str = dataclasses.field(default="", compare=False)

    def __call__(self, x):
        return self.by * x


def changed(array, index=1000):
    other = array.copy()
    other[index] += 1
    return other


def enclosing(number):
    return lambda x: x * number


LONG = np.arange(2000)
DIFFERENT = {
    "strings that run together": (("ab", "c"), ("a", "bc")),
    "nested": ((1, (2, 3)), ((1, 2), 3)),
    "one and true": (1, True),
    "one and 1.0": (1, 1.0),
    "text and bytes": ("a", b"a"),
    "none and text": (None, "None"),
    "the middle of an array": (LONG, changed(LONG)),
    "shapes": (np.zeros((2, 3)), np.zeros((3, 2))),
    "types of the same bytes": (np.zeros(4, np.int32), np.zeros(4, np.float32)),
    "types that numpy lacks": (np.zeros(4, ml_dtypes.bfloat16), np.zeros(4, np.float16)),
    "empty arrays": (np.zeros((0, 2)), np.zeros((2, 0))),
    "an array and its bytes": (LONG, LONG.tobytes()),
    "strings in arrays": (np.array(["a", "bc"], object), np.array(["ab", "c"], object)),
    "values of mappings": ({"a": 1}, {"a": 2}),
    "an array inside": ({"a": [LONG]}, {"a": [changed(LONG)]}),
    "grids that are printed alike": (INT8, INT8.narrow),
    "fields": (Scaled(1.0), Scaled(2.0)),
    "closures": (enclosing(1), enclosing(2)),
    "code": (lambda x: x + 1, lambda x: x + 2),
    "arguments": (functools.partial(max, 1), functools.partial(max, 2)),
    "compiled functions": (jax.jit(lambda x: x + 1), jax.jit(lambda x: x + 2)),
    "attributes": (Node("A", (), ("y",), {"v": LONG}), Node("A", (), ("y",), {"v": changed(LONG)})),
}
EQUAL = {
    "mappings in another order": ({"a": 1, "b": LONG}, {"b": LONG.copy(), "a": 1}),
    "sets": ({"a", "b", "c"}, {"c", "b", "a"}),
    "another device": (np.float32([1, 2]), jnp.float32([1, 2])),
    "strides": (np.arange(6).reshape(2, 3).T, np.array([[0, 3], [1, 4], [2, 5]])),
    "what is not compared": (Scaled(1.0, "one"), Scaled(1.0, "other")),
    "names of nodes": (Node("A", ("x",), ("y",), {}, "one"), Node("A", ("x",), ("y",), {}, "other")),
    "functions made twice": (enclosing(1), enclosing(1)),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_tells_apart(case):
    one, other = DIFFERENT[case]
    assert digest(one) != digest(other)


@pytest.mark.parametrize("case", EQUAL)
def test_is_the_same_for(case):
    one, other = EQUAL[case]
    assert digest(one) == digest(other)


def test_of_a_graph_is_what_it_computes():
    model = onnx.load(jq.zoo.path("fashion_resnet"))
    one, renamed, other = (jq.load(model) for _ in range(3))
    renamed = renamed.replace(name="another", metadata={"made": "today"})
    name, weight = next((k, v) for k, v in other.params.items() if v.size > 1000)
    other = other.with_arrays(
        {**other.arrays, name: changed(weight.reshape(-1), weight.size // 2).reshape(weight.shape)}
    )
    assert digest(one) == digest(renamed) != digest(other)


def test_is_the_same_in_every_process():
    code = (
        "from jq.util.digest import digest; print(digest({'a', 'b', 'c', 'd'}, {'x': lambda v: v in {'p', 'q', 'r'}}))"
    )
    run = functools.partial(subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (
        run(env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)}).stdout
        == run(env={"PYTHONHASHSEED": "2", "PYTHONPATH": ":".join(sys.path)}).stdout
    )


def test_of_what_has_no_value_is_an_error():
    with pytest.raises(jq.ConfigError, match=r"got a builtins\.object"):
        digest(object())
