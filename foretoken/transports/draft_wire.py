"""Convert draft requests and batches to protobuf and back.

Only the services' edges see protobuf types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretoken.drafting import (
    FINAL_NORM,
    RAGGED_COLUMNS,
    ROW_COLUMNS,
    DraftBatch,
    DrafterNeeds,
    DraftRequest,
    TargetInfo,
    TreeLimits,
)
from foretoken.errors import InvalidRequestError, PreconditionError
from foretoken.transports.transport import check_request
from foretoken.tree import Int32
from protos import drafter_pb2

INT32_MAX = 2**31 - 1
# Fields of the messages that have another name than the values' attributes.
_FIELDS = {"batch_slots": "slots", "max_batch_slots": "max_slots"}


def target_to_proto(target: TargetInfo) -> drafter_pb2.TargetInfo:
    values = asdict(target) | {"usual_trees": [tree._asdict() for tree in target.usual_trees]}
    return drafter_pb2.TargetInfo(**{_field(name): value for name, value in values.items()})


def target_from_proto(message: drafter_pb2.TargetInfo) -> TargetInfo:
    values = {field.name: getattr(message, _field(field.name)) for field in fields(TargetInfo)}
    values["usual_trees"] = tuple(TreeLimits(tree.max_depth, tree.max_branches) for tree in message.usual_trees)
    return TargetInfo(**values)


def needs_to_proto(algorithm: str, needs: DrafterNeeds) -> drafter_pb2.PrepareResponse:
    values = asdict(needs)
    features, resident = values.pop("captured_layers"), values.pop("overlaps")
    return drafter_pb2.PrepareResponse(algorithm=algorithm, features=features, resident=resident, **values)


def needs_from_proto(message: drafter_pb2.PrepareResponse, target: TargetInfo) -> DrafterNeeds:
    """Convert needs. Raises PreconditionError for hidden states that the target does not have."""
    layers = tuple(message.features)
    if any(not FINAL_NORM <= layer <= target.num_layers for layer in layers):
        raise PreconditionError(f"hidden states {layers} are needed; the target has {target.num_layers} layers")
    return DrafterNeeds(layers, message.num_rerun, message.blocks, message.weights, message.device, message.resident)


def request_to_proto(request: DraftRequest) -> drafter_pb2.DraftRequest:
    """Convert a request, which must carry its tokens.

    Only sides on one device share device memory.
    """
    assert request.device_step is None, "a gRPC stream shares no device memory"
    columns: dict[str, Any] = {_field(name): getattr(request, name).tolist() for name in ROW_COLUMNS}
    for values, starts in RAGGED_COLUMNS.items():
        columns[starts] = getattr(request, starts).tolist()
        array = getattr(request, values)
        columns[values] = array.astype("<f4").tobytes() if values == "hidden" else array.tolist()
    return drafter_pb2.DraftRequest(epoch=request.epoch, step_id=request.step_id, **columns)


def request_from_proto(message: drafter_pb2.DraftRequest, max_rows: int, hidden_width: int) -> DraftRequest:
    """Convert a request.

    Raises InvalidRequestError if it is malformed (as transport.check_request).
    """
    try:
        columns: dict[str, Any] = {}
        for name, dtype in ROW_COLUMNS.items():
            column = getattr(message, _field(name))
            columns[name] = _int32(column) if dtype is np.int32 else np.array(column, dtype)
        for values, starts in RAGGED_COLUMNS.items():
            columns[starts] = _int32(getattr(message, starts))
            column = getattr(message, values)
            columns[values] = _hidden(column, hidden_width) if values == "hidden" else _int32(column)
        request = DraftRequest.of_columns(message.epoch, message.step_id, columns)
        check_request(request, max_rows)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error
    return request


def _field(name: str) -> str:
    """Return the name of an attribute's field in the messages."""
    return _FIELDS.get(name, name)


def _hidden(data: bytes, width: int) -> NDArray[np.float32]:
    """Return a copy as float32 [rows, width]."""
    values = np.frombuffer(data, "<f4").astype(np.float32)
    if width == 0 and len(values):
        raise ValueError("hidden states for a drafter that needs none")
    return values.reshape(-1, width) if width else values.reshape(0, 0)


def batch_to_proto(batch: DraftBatch) -> drafter_pb2.DraftResponse:
    return drafter_pb2.DraftResponse(
        epoch=batch.epoch,
        step_id=batch.step_id,
        node_starts=batch.node_starts.tolist(),
        tokens=batch.tokens.tolist(),
        parents=batch.parents.tolist(),
        scores=batch.scores.tolist(),
    )


def batch_from_proto(message: drafter_pb2.DraftResponse) -> DraftBatch | None:
    """Convert a batch, which transport.check_batch must check.

    None if a value does not fit in 32 bits.
    """
    try:
        return DraftBatch(
            epoch=message.epoch,
            step_id=message.step_id,
            node_starts=_int32(message.node_starts),
            tokens=_int32(message.tokens),
            parents=_int32(message.parents),
            scores=np.array(message.scores, np.float32),
        )
    except ValueError:
        return None


def _int32(values: Sequence[int]) -> Int32:
    wide = np.array(values, np.int64)
    if len(wide) and wide.max() > INT32_MAX:
        raise ValueError(f"{int(wide.max())} does not fit in 32 bits")
    return wide.astype(np.int32)
