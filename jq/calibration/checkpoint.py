"""Statistics on disk during a calibration, from which a stopped run resumes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from jq.calibration import stats as saved
from jq.calibration.stats import Stats
from jq.errors import DataError


@dataclasses.dataclass(frozen=True)
class Keeper:
    """Keeps a run's statistics in a file; without a path it does nothing.

    Where several processes make one run, the first decides and writes, on storage that all of them read.
    """

    path: Path | None = None
    identity: str = ""  # of the run: a file of another one is refused
    shared: bool = False

    def resume(self) -> Stats | None:
        """The statistics that an earlier run left, or None."""
        exists = self.path is not None and self.path.exists()
        if self.shared:
            exists = bool(multihost_utils.broadcast_one_to_all(np.int32(exists)))
        if self.path is None or not exists:
            return None
        stats, extra = saved.read(self.path)
        if extra.get("identity") != self.identity:
            raise DataError(f"{self.path} is of another model, config or data; remove it, or choose another checkpoint")
        return stats

    def keep(self, stats: Stats) -> None:
        """Write the statistics so far, which all processes have."""
        if self.path is not None and self._writes:
            saved.write(self.path, stats, {"identity": self.identity})

    def forget(self) -> None:
        """Remove the file: the run has ended."""
        if self.path is not None and self._writes:
            self.path.unlink(missing_ok=True)
        if self.shared:
            multihost_utils.sync_global_devices("jq.calibrate has ended")

    @property
    def _writes(self) -> bool:
        return not self.shared or jax.process_index() == 0
