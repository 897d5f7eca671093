"""Sample and walk on a GPU: sample every node's row at once, then walk, without the host.

The device keeps each request's sampling rules and penalty counts in the request's batch slot. The
host walks sequences with a grammar or token masks, which may depend on the token before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from foretoken_kernels.gpu.sample import SampleWorkspace, sample_rows, sample_workspace
from foretoken_kernels.gpu.walk import walk
from foretoken_kernels.sampler_state import (
    FINISH_BROKEN,
    FINISH_LENGTH,
    FINISH_NOT_ALLOWED,
    FINISH_STOP,
    SampleBatch,
    SamplerState,
    WalkTensors,
    new_sampler_state,
    reset_batch_slots,
)

from foretoken.errors import ForetokenError, InvalidRequestError
from foretoken.limits import MAX_LOGIT_BIAS_ENTRIES
from foretoken.models.device_batch import bucket, seq_bucket
from foretoken.models.device_graph import DeviceGraphs
from foretoken.models.device_journal import DeviceJournal
from foretoken.models.pinned_buffers import PinnedBuffers
from foretoken.results import FinishReason, TokenLogprobs
from foretoken.sampling import has_token_masks, is_greedy, noise_key
from verifier_svc.sampling.device_logprobs import device_logprobs
from verifier_svc.sampling.device_masks import DeviceMasks, SentMasks
from verifier_svc.sampling.verify import WalkResult, broken_logits
from verifier_svc.sampling.walker import SampledSequence, Walk, walk_on_host

# Columns of SamplerState that the host sets: one value for each batch slot.
_RULES = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition",
    "frequency",
    "presence",
    "seed_low",
    "seed_high",
    "choice",
    "min_tokens",
    "num_bias",
    "num_stops",
)
# Besides these, one row for each batch slot.
_ROWS = ("stop_ids",)
_FINISHES = {FINISH_STOP: FinishReason.STOP, FINISH_LENGTH: FinishReason.LENGTH}
_ERRORS: dict[int, Callable[[], ForetokenError]] = {
    FINISH_BROKEN: broken_logits,
    # verify.followed names the request's field.
    FINISH_NOT_ALLOWED: partial(InvalidRequestError, "the model gives no token that the request allows"),
}
# Most stop ids of one request, including the model's.
_MAX_STOPS = 128


class _Shape(NamedTuple):
    rows: int
    seqs: int


class WalkStage:
    """The buffers of one graph shape.

    Attributes:
        asked: the walk's input (SampleBatch), as pinned buffers.
        found: the results of each step: WalkTensors, and ``num_nodes`` of the walked trees, for
            callers whose host does not know them.
    """

    def __init__(self, shape: _Shape, max_tokens: int, depth: int, device: torch.device) -> None:
        """``max_tokens``: most tokens of one walk; ``depth``: most steps that may be unread."""
        rows, seqs = shape
        self.asked = PinnedBuffers(
            {
                "row_seqs": ((rows,), torch.int32),
                "tokens": ((rows,), torch.int32),
                "parents": ((rows,), torch.int32),
                "row_starts": ((seqs + 1,), torch.int32),
                "batch_slots": ((seqs,), torch.int32),
                "positions": ((seqs,), torch.int32),
                "num_outputs": ((seqs,), torch.int32),
                "max_new": ((seqs,), torch.int32),
            },
            device,
        )
        many = ("tokens", "nodes", "accepted")
        found = {name: (seqs, max_tokens) if name in many else (seqs,) for name in (*WalkTensors._fields, "num_nodes")}
        self.found = DeviceJournal(found, depth, device)
        self.result = WalkTensors(**{name: self.found.device[name] for name in WalkTensors._fields})
        self.sampled = torch.zeros(rows, dtype=torch.int32, device=device)


class DeviceWalker:
    """A ``verifier_svc.sampling.walker.Walker`` on a GPU. It keeps sampling state by batch slot.

    Args:
        vocab_size: width of the logits.
        token_limit: ids below this one may be sampled.
        max_batch_slots: most sequences that run at once.
        max_rows: most rows of logits in one step.
        max_nodes: most nodes of one tree.
        graphs: whether to capture sampling and walk as graphs.

    Attributes:
        masks: the way of token masks to the device, for callers of ``sample_and_walk``.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        token_limit: int,
        max_batch_slots: int,
        max_rows: int,
        max_nodes: int,
        device: torch.device,
        graphs: bool,
    ) -> None:
        self._token_limit, self._max_batch_slots, self._max_tokens = token_limit, max_batch_slots, max_nodes
        self._device = device
        self.masks = DeviceMasks(max_rows, token_limit, device)
        self._workspace: SampleWorkspace = sample_workspace(max_rows, vocab_size, device)
        state = new_sampler_state(max_batch_slots, vocab_size, MAX_LOGIT_BIAS_ENTRIES, _MAX_STOPS, device)
        # One copy sends the rules of all batch slots. Biases are copied only if a request has some.
        sent = (*_RULES, *_ROWS)
        columns = {name: (tuple(getattr(state, name).shape), getattr(state, name).dtype) for name in sent}
        self._rules = PinnedBuffers(columns, device)
        for name in sent:
            self._rules.host[name][:] = getattr(state, name).cpu().numpy()
        self._state: SamplerState = state._replace(**self._rules.device)
        # For each batch slot, the generation of the sequence whose rules it holds.
        self._generations = [-1] * max_batch_slots
        self._stages: dict[_Shape, WalkStage] = {}
        self._graphs = DeviceGraphs(graphs and device.type == "cuda")

    @torch.inference_mode()
    def walk(self, walks: Items[Walk], logits: torch.Tensor) -> list[WalkResult]:
        on_device = [each for each in walks if not has_token_masks(each.sequence.sampling)]
        results: dict[int, WalkResult] = {}
        if on_device:
            self.send_rules([each.sequence for each in on_device])
            stage = self._launch(on_device, logits)
            stage.found.record()
            stage.found.wait()
            found = stage.found.take()
            walked = walk_results(found, [(index, each.sources) for index, each in enumerate(on_device)])
            for each, result in zip(on_device, _with_logprobs(on_device, found["nodes"], walked, logits), strict=True):
                results[id(each)] = result
        for each in walks:
            if has_token_masks(each.sequence.sampling):
                results[id(each)] = walk_on_host(each, logits)
                # The device does not count these tokens.
                self._generations[each.sequence.batch_slot] = -1
        return [results[id(each)] for each in walks]

    @torch.inference_mode()
    def logprobs(self, logits: torch.Tensor, token_ids: Items[int], top_k: int) -> list[TokenLogprobs]:
        return device_logprobs(logits, range(len(token_ids)), token_ids, [top_k] * len(token_ids))

    @torch.inference_mode()
    def warm_up(self, vocab_size: int) -> None:
        """Compile the kernels. Call it before any sequence has a batch slot."""
        stage = self.new_stage(1, 1, 1)
        stage.asked.host["row_seqs"][:] = -1
        stage.asked.send()
        logits = torch.zeros((1, vocab_size), dtype=torch.float32, device=self._device)
        self.sample_and_walk(stage, logits)
        self.logprobs(logits, [0], 1)

    def new_stage(self, rows: int, seqs: int, depth: int) -> WalkStage:
        """Return a new stage for a caller that fills it on the device. ``depth``: see WalkStage."""
        return WalkStage(_Shape(rows, seqs), self._max_tokens, depth, self._device)

    def _launch(self, walks: list[Walk], logits: torch.Tensor) -> WalkStage:
        rows = max(each.first_row + each.tree.num_nodes for each in walks)
        # Rows of logits after this step's rows hold values of earlier steps.
        shape = _Shape(
            min(bucket(rows), len(self._workspace.depths)), min(seq_bucket(len(walks)), self._max_batch_slots)
        )
        if shape not in self._stages:
            self._stages[shape] = WalkStage(shape, self._max_tokens, 1, self._device)
        stage = self._stages[shape]
        stage.asked.wait()
        host = stage.asked.host
        # Rows between two sequences' rows (of grammars or prompt logprobs) count as nodes of the
        # former sequence: without a token, no walk reaches them.
        host["row_seqs"][:], host["parents"][:], host["tokens"][:] = -1, -1, -1
        host["row_starts"][:] = rows
        for index, (sequence, tree, first_row, _) in enumerate(walks):
            end = first_row + tree.num_nodes
            host["row_seqs"][first_row:end] = index
            host["tokens"][first_row:end] = tree.tokens
            host["parents"][first_row:end] = tree.parents
            host["row_starts"][index] = first_row
            host["batch_slots"][index] = sequence.batch_slot
            host["positions"][index] = len(sequence.tokens)
            host["num_outputs"][index] = sequence.num_output_tokens
            host["max_new"][index] = sequence.max_new_tokens
        host["row_starts"][len(walks)] = rows
        host["batch_slots"][len(walks) :] = 0
        host["max_new"][len(walks) :] = 1
        stage.asked.send()
        whole = _first_rows(logits, shape.rows)
        key = (shape, whole.data_ptr())
        self._graphs.run(key, lambda: self.sample_and_walk(stage, whole))
        return stage

    def sample_and_walk(self, stage: WalkStage, logits: torch.Tensor, masks: SentMasks | None = None) -> None:
        """Launch the kernels without waiting for them."""
        batch = SampleBatch(logits=logits, vocab_limit=self._token_limit, **stage.asked.device)
        if masks is not None:
            batch = batch._replace(mask_rows=masks.rows, mask_bits=masks.bits)
        sample_rows(batch, self._state, self._workspace, stage.sampled)
        walk(batch, stage.sampled, self._state, stage.result)

    def send_rules(self, sequences: Items[SampledSequence]) -> None:
        """Send the rules of sequences that are new in their batch slots to the device."""
        fresh = [s for s in sequences if self._generations[s.batch_slot] != s.generation]
        if not fresh:
            return
        self._rules.wait()
        for sequence in fresh:
            self._generations[sequence.batch_slot] = sequence.generation
            self._set_rules(sequence)
        self._rules.send()
        counted = [s for s in fresh if _is_penalized(s)]
        if counted:
            self._count(counted)

    def _set_rules(self, sequence: SampledSequence) -> None:
        params, batch_slot = sequence.sampling, sequence.batch_slot
        seed_low, seed_high = noise_key(params.seed)
        bias = {token: value for token, value in params.logit_bias.items() if token < self._token_limit}
        stops = sorted(sequence.sampler.stop_ids)[:_MAX_STOPS]
        values = (
            0.0 if is_greedy(params) else params.temperature,
            max(params.top_k, 0),
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
            seed_low,
            seed_high,
            sequence.choice_index,
            params.min_tokens,
            len(bias),
            len(stops),
        )
        for name, value in zip(_RULES, values, strict=True):
            self._rules.host[name][batch_slot] = value
        self._rules.host["stop_ids"][batch_slot, : len(stops)] = stops
        if bias:
            self._state.bias_ids[batch_slot, : len(bias)] = self._sent(list(bias), torch.int32)
            self._state.bias_values[batch_slot, : len(bias)] = self._sent(list(bias.values()), torch.float32)

    def _sent(self, values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        """Return values on the device, copied in stream order: the host waits for no step."""
        on_host = torch.tensor(values, dtype=dtype)
        if self._device.type == "cuda":
            on_host = on_host.pin_memory()
        return on_host.to(self._device, non_blocking=True)

    def _count(self, sequences: list[SampledSequence]) -> None:
        """Count the tokens of prompt and output so far on the device, for the penalties."""
        prompt, output = [], []
        for sequence in sequences:
            split, limit = sequence.num_prompt_tokens, self._state.counts.shape[1]
            prompt += [(sequence.batch_slot, token) for token in set(sequence.tokens[:split]) if token < limit]
            output += [(sequence.batch_slot, token) for token in sequence.tokens[split:]]
        batch_slots = self._sent([s.batch_slot for s in sequences], torch.int64)
        pairs = [self._sent(each, torch.int64).reshape(-1, 2) for each in (prompt, output)]
        reset_batch_slots(self._state, batch_slots, pairs[0][:, 1], pairs[0][:, 0], pairs[1][:, 1], pairs[1][:, 0])


def walk_results(
    found: Mapping[str, np.ndarray], wanted: Items[tuple[int, Items[int] | int | None]]
) -> list[WalkResult]:
    """Return walk results without logprobs.

    Args:
        found: the device's WalkTensors, fetched.
        wanted: for each result, the sequence's index in ``found`` and its nodes' sources, as in
            Walk; a number stands for all nodes.
    """
    # Whole arrays at once: elements of numpy arrays are slow to read one by one.
    num_walked, num_tokens, num_matched, num_accepted, finishes = (
        found[name].tolist() for name in ("num_walked", "num_tokens", "num_matched", "num_accepted", "finish")
    )
    longest = max(num_walked, default=0)
    all_tokens, all_accepted = found["tokens"][:, :longest].tolist(), found["accepted"][:, :longest].tolist()
    results = []
    for index, sources in wanted:
        count, walked = num_tokens[index], num_walked[index]
        tokens, matched = all_tokens[index], all_accepted[index][: num_matched[index]]
        accepted = matched[: num_accepted[index]]
        if sources is None or isinstance(sources, int):
            from_drafters = [1 if sources is None else sources] * len(accepted)
        else:
            from_drafters = [int(sources[node]) for node in accepted]
        from_drafters += [0] * (count - len(accepted))
        finish, stop, error = None, None, None
        if finishes[index]:
            finish = _FINISHES.get(finishes[index])
            stop = tokens[walked - 1] if finish is FinishReason.STOP else None
            error = _ERRORS[finishes[index]]() if finishes[index] in _ERRORS else None
        results.append(WalkResult(tokens[:count], accepted, from_drafters, finish, stop, [], walked, matched, error))
    return results


def _with_logprobs(
    walks: list[Walk], nodes: np.ndarray, results: list[WalkResult], logits: torch.Tensor
) -> list[WalkResult]:
    """Return the results with the logprobs that their requests want.

    ``nodes``: [walks, any], the nodes whose rows gave the tokens.
    """
    wanted = [each.sequence.sampling.logprobs for each in walks]
    rows: list[int] = []
    tokens: list[int] = []
    top_k: list[int] = []
    for index, (each, most, result) in enumerate(zip(walks, wanted, results, strict=True)):
        if most is not None:
            count = len(result.tokens)
            rows += (each.first_row + nodes[index, :count]).tolist()
            tokens += result.tokens
            top_k += [most] * count
    found = iter(device_logprobs(logits, rows, tokens, top_k))
    return [
        result if most is None else result._replace(logprobs=list(islice(found, len(result.tokens))))
        for most, result in zip(wanted, results, strict=True)
    ]


def _is_penalized(sequence: SampledSequence) -> bool:
    params = sequence.sampling
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)


def _first_rows(logits: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the first ``rows`` rows, [rows, vocab], of the buffer that starts with ``logits``."""
    return logits.as_strided((rows, logits.shape[1]), logits.stride(), logits.storage_offset())
