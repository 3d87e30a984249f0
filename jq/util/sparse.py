"""Sparse matrices for scipy's integer programs."""

from __future__ import annotations

from typing import Any

import numpy as np


def for_solver(matrix: Any) -> Any:
    """Return a sparse matrix with indices of 32 bits: the solver takes no others, and older versions of scipy convert none."""
    matrix = matrix.tocsc()
    matrix.indices, matrix.indptr = matrix.indices.astype(np.int32), matrix.indptr.astype(np.int32)
    return matrix
