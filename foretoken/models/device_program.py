"""Programs as a GPU runs them: neighbouring operations that one kernel can do become one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from foretoken_kernels.cpu import decoder as kernel

from foretoken.models.program import Attention, Columns, Operation, Program


class Step(NamedTuple):
    """One operation, and the neighbours that its kernel also does.

    Attributes:
        turned: for the matmul of queries, keys and values: the attention whose ROPE comes after it.
        fetch: for a NORM: the EMBED or COPY before it, whose rows it normalizes.
    """

    operation: Operation
    turned: Attention | None = None
    fetch: Operation | None = None


@dataclass(slots=True, eq=False)
class DeviceProgram:
    """A program whose buffers are allocated. ``number`` identifies it in the keys of graphs."""

    steps: list[Step]
    number: int


def fused_steps(program: Program) -> list[Step]:
    """Return the program's operations as steps."""
    steps: list[Step] = []
    for operation in program.operations:
        before = steps[-1].operation if steps else None
        if operation.code == kernel.ROPE:
            linear = steps.pop().operation
            assert linear.code == kernel.LINEAR and linear.out == operation.x, "ROPE follows the matmul that it rotates"
            steps.append(Step(linear, operation.attention))
        elif before is not None and _is_norm_of(operation, before):
            steps[-1] = Step(operation, fetch=before)
        elif before is not None and _passes_on_given(before, operation):
            steps[-1] = Step(operation._replace(x=before.x))
        else:
            steps.append(Step(operation))
    return steps


def _is_norm_of(operation: Operation, fetch: Operation) -> bool:
    """Return whether one kernel can fetch rows and normalize them."""
    if operation.code != kernel.NORM or operation.rows != kernel.EVERY_ROW or fetch.rows != kernel.EVERY_ROW:
        return False
    if fetch.code == kernel.EMBED:
        return fetch.zero_position < 0 and operation.x == fetch.out
    return fetch.code == kernel.COPY and operation.x in (fetch.x, fetch.out)


def _passes_on_given(copy: Operation, operation: Operation) -> bool:
    """Return whether a matmul can read GIVEN itself instead of its copy.

    It can if nothing else reads the copy.
    """
    return (
        copy.code == kernel.COPY
        and copy.x is not None
        and copy.x == Columns(kernel.GIVEN, copy.x.size)
        and copy.out == Columns(kernel.EMBEDDED, copy.x.size)
        and operation.code == kernel.LINEAR
        and operation.x == copy.out
    )
