"""What runs a model's programs: ForwardPass on a CPU, DevicePass on a GPU."""

from __future__ import annotations

from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from foretoken.models.batch import ForwardBatch
from foretoken.models.program import Program

# A program in the form that an executor runs.
Loaded = TypeVar("Loaded")


class Executor(Protocol[Loaded]):
    """The buffers of one model, and programs over them. Only one thread at a time may use it."""

    def load(self, program: Program) -> Loaded:
        """Return the program in the form that ``run`` takes."""
        ...

    def run(self, loaded: Loaded, batch: ForwardBatch, given: NDArray[np.float32] | None = None) -> None:
        """Run the program over a batch.

        Keys and values of all rows are written before any row attends, so the nodes of a tree see
        each other in the same pass.

        Args:
            given: float32 [rows, any]; what the program reads as GIVEN.

        Raises:
            ValueError: the executor cannot run this batch; nothing was written.
        """
        ...

    def buffer(self, field: int, rows: int, width: int) -> torch.Tensor:
        """Return the buffer ``field`` after a run, as a view [rows, width].

        It is valid until the next run.
        """
        ...
