"""Draft requests and batches to protobuf and back, column by column. Nothing past the rims sees a protobuf type."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foretoken.drafting import DraftBatch, DraftRequest, TargetInfo
from foretoken.errors import InvalidRequestError
from foretoken.transport import check_request
from foretoken.tree import Int32
from protos import drafter_pb2

INT32_MAX = 2**31 - 1


def target_to_proto(target: TargetInfo) -> drafter_pb2.TargetInfo:
    return drafter_pb2.TargetInfo(
        model_fingerprint=target.model_fingerprint,
        vocab_size=target.vocab_size,
        max_model_len=target.max_model_len,
        max_slots=target.max_slots,
        max_nodes=target.max_nodes,
    )


def target_from_proto(message: drafter_pb2.TargetInfo) -> TargetInfo:
    return TargetInfo(
        model_fingerprint=message.model_fingerprint,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        max_slots=message.max_slots,
        max_nodes=message.max_nodes,
    )


def request_to_proto(request: DraftRequest) -> drafter_pb2.DraftRequest:
    return drafter_pb2.DraftRequest(
        epoch=request.epoch,
        step_id=request.step_id,
        slots=request.slots.tolist(),
        generations=request.generations.tolist(),
        lengths=request.lengths.tolist(),
        prompt_lengths=request.prompt_lengths.tolist(),
        max_nodes=request.max_nodes.tolist(),
        new_token_starts=request.new_token_starts.tolist(),
        new_tokens=request.new_tokens.tolist(),
        salts=request.salts.tolist(),
        seeds=request.seeds.tolist(),
        choice_indices=request.choice_indices.tolist(),
        temperatures=request.temperatures.tolist(),
    )


def request_from_proto(message: drafter_pb2.DraftRequest, max_rows: int) -> DraftRequest:
    """Raises InvalidRequestError unless it is well-formed (``foretoken.transport.check_request``)."""
    try:
        request = DraftRequest(
            epoch=message.epoch,
            step_id=message.step_id,
            slots=_int32(message.slots),
            generations=_int32(message.generations),
            lengths=_int32(message.lengths),
            prompt_lengths=_int32(message.prompt_lengths),
            max_nodes=_int32(message.max_nodes),
            new_token_starts=_int32(message.new_token_starts),
            new_tokens=_int32(message.new_tokens),
            salts=np.array(message.salts, np.uint64),
            seeds=np.array(message.seeds, np.uint64),
            choice_indices=_int32(message.choice_indices),
            temperatures=np.array(message.temperatures, np.float32),
        )
        check_request(request, max_rows)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error
    return request


def batch_to_proto(batch: DraftBatch) -> drafter_pb2.DraftResponse:
    return drafter_pb2.DraftResponse(
        epoch=batch.epoch,
        step_id=batch.step_id,
        node_starts=batch.node_starts.tolist(),
        tokens=batch.tokens.tolist(),
        parents=batch.parents.tolist(),
    )


def batch_from_proto(message: drafter_pb2.DraftResponse) -> DraftBatch | None:
    """To be checked by ``foretoken.transport.check_batch``; None if a value does not fit in 32 bits."""
    try:
        return DraftBatch(
            epoch=message.epoch,
            step_id=message.step_id,
            node_starts=_int32(message.node_starts),
            tokens=_int32(message.tokens),
            parents=_int32(message.parents),
        )
    except ValueError:
        return None


def _int32(values: Sequence[int]) -> Int32:
    wide = np.array(values, np.int64)
    if len(wide) and wide.max() > INT32_MAX:
        raise ValueError(f"{int(wide.max())} does not fit in 32 bits")
    return wide.astype(np.int32)
