"""A small runner of the ONNX backend suite: cases, data sets and the suite's own verdict.

python -m tests.onnx_backend.suite            run every case, print what fails, count
python -m tests.onnx_backend.suite --update   also add the newly passing ones to passing.txt
"""

from __future__ import annotations

import argparse
import functools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import numpy_helper

from jq.testing.backend import prepare

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator", "real")
PASSING = Path(__file__).with_name("passing.txt")
LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"


@functools.cache
def cases() -> dict[str, Any]:
    """Every case of the installed onnx by `kind/name`; onnx makes the node cases as it imports them."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {f"{kind}/{case.name}": case for kind in KINDS for case in load_model_tests(kind=kind)}


@functools.cache
def passing() -> frozenset[str]:
    """The committed list: it may only grow."""
    return frozenset(PASSING.read_text().split())


def check(case: Any) -> None:
    """Run one case on all its data sets; raises what went wrong."""
    model = _model(case)
    run = prepare(model)
    for inputs, expected in _data_sets(case, model):
        outputs = run(inputs)
        assert len(outputs) == len(expected), f"{len(outputs)} outputs, expected {len(expected)}"
        for output, want in zip(outputs, expected, strict=True):
            _compare(output, want, case.rtol, case.atol)


def _model(case: Any) -> onnx.ModelProto:
    if case.model is not None:
        return case.model
    return onnx.load(Path(case.model_dir) / "model.onnx" if case.model_dir else LIGHT / Path(case.url).name)


def _data_sets(case: Any, model: onnx.ModelProto) -> Iterator[tuple[list[Any], list[Any]]]:
    graph = model.graph
    if case.data_sets is not None:
        for inputs, outputs in case.data_sets:
            yield [_value(x) for x in inputs], [_value(x) for x in outputs]
    elif case.model_dir:
        for folder in sorted(Path(case.model_dir).glob("test_data_set*")):
            inputs = [
                _read(folder / f"input_{i}.pb", v.type)
                for i, v in enumerate(graph.input)
                if (folder / f"input_{i}.pb").exists()
            ]
            yield inputs, [_read(folder / f"output_{i}.pb", v.type) for i, v in enumerate(graph.output)]
    else:  # a real topology without its weights: the suite feeds a ramp
        stored = {t.name for t in graph.initializer}
        shapes = [[d.dim_value or 1 for d in v.type.tensor_type.shape.dim] for v in graph.input if v.name not in stored]
        ramps = [(np.arange(np.prod(s)).reshape(s) / np.prod(s)).astype(np.float32) for s in shapes]
        stem = LIGHT / Path(case.url).stem
        yield (
            ramps,
            [numpy_helper.to_array(onnx.load_tensor(f"{stem}_output_{i}.pb")) for i in range(len(graph.output))],
        )


def _value(value: Any) -> Any:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def _read(path: Path, kind: onnx.TypeProto) -> Any:
    if kind.HasField("sequence_type"):
        return numpy_helper.to_list(onnx.SequenceProto.FromString(path.read_bytes()))
    if kind.HasField("optional_type"):
        return numpy_helper.to_optional(onnx.OptionalProto.FromString(path.read_bytes()))
    return numpy_helper.to_array(onnx.TensorProto.FromString(path.read_bytes()))


def _compare(output: Any, want: Any, rtol: float, atol: float) -> None:
    if want is None or output is None:
        assert output is None, "expected an empty optional"
        assert want is None, "an empty optional came out"
        return
    if isinstance(want, (list, tuple)):
        assert len(output) == len(want), f"a sequence of {len(output)}, expected {len(want)}"
        for part, wanted in zip(output, want, strict=True):
            _compare(part, wanted, rtol, atol)
        return
    output, want = np.asarray(output), np.asarray(want)
    assert output.shape == want.shape, f"shape {output.shape}, expected {want.shape}"
    if want.dtype == object or want.dtype.kind in "SU":
        np.testing.assert_array_equal(output.astype(object), want.astype(object))
        return
    assert output.dtype == want.dtype, f"type {output.dtype}, expected {want.dtype}"
    if want.dtype == ml_dtypes.bfloat16:
        rtol = max(rtol, 2.0**-6)  # two units in the last place, as the suite allows
    if want.dtype.kind not in "biufc" or want.dtype == ml_dtypes.bfloat16:
        output, want = output.astype(np.float32), want.astype(np.float32)
    if want.dtype.kind == "f" and np.isfinite(want).any():  # sums that cancel keep an error of the largest values
        atol = max(atol, 1e-8 * float(np.abs(want[np.isfinite(want)]).max()))
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(output, want, rtol=rtol, atol=atol)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true")
    update = parser.parse_args().update
    passed = set()
    for name, case in cases().items():
        try:
            check(case)
            passed.add(name)
        except Exception as error:
            mark = "LOST " if name in passing() else ""
            print(f"{mark}{name}: {type(error).__name__}: {' '.join(str(error).split())[:160]}")
    print(f"{len(passed)} of {len(cases())} cases pass; onnx {onnx.__version__}")
    if update:
        PASSING.write_text("\n".join(sorted(passing() | passed)) + "\n")


if __name__ == "__main__":
    main()
