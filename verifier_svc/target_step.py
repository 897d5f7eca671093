"""Run the target in a step: one pass over the scheduled rows, then sample, walk and commit."""

from __future__ import annotations

import math
from collections.abc import Sequence as Items

import numpy as np
import torch

from foretoken.tree import DraftTree
from verifier_svc.engine_counters import StepTimes
from verifier_svc.lifecycle import Lifecycle
from verifier_svc.model.target_runner import TargetRunner
from verifier_svc.sampling.verify import WalkResult, broken_logits
from verifier_svc.sampling.walker import Walk, Walker
from verifier_svc.scheduling.batch import Scheduled, StepBatch, build_batch, commit_kv_slots
from verifier_svc.scheduling.draft import DrafterShare
from verifier_svc.scheduling.hidden_states import HiddenSlice, PassHiddenStates
from verifier_svc.scheduling.sequence import Sequence
from verifier_svc.speculation.speculator import Speculator


class TargetStep:
    """Run the target for the engine. Only the engine thread uses it."""

    def __init__(self, runner: TargetRunner, walker: Walker, speculator: Speculator, lifecycle: Lifecycle) -> None:
        self._runner, self._walker = runner, walker
        self._speculator, self._lifecycle = speculator, lifecycle
        self._blocks = lifecycle.blocks
        # The hidden states of the last pass that drafters get.
        self._kept: PassHiddenStates | None = None

    def run(self, scheduled: list[Scheduled], times: StepTimes) -> None:
        """Run the target on a step's parts and commit their tokens. Add the phases to ``times``."""
        for part in scheduled:
            self._choose_rows(part)
        with times.phase("forward"):
            blocks = self._blocks
            batch = build_batch(scheduled, blocks.block_size, blocks.num_blocks * blocks.block_size)
            # Capturing costs time: skip it if no drafter of these rows wants hidden states.
            is_wanted = any(part.wants_hidden_states for part in scheduled)
            captured = self._speculator.hidden_states.layers if is_wanted else ()
            if all(part.was_decoding for part in scheduled):
                # On a CPU a pass over prompts has all cores.
                self._speculator.learn_beside()
            logits = self._runner.forward(batch.forward, captured)
        with times.phase("verify"):
            self._verify(scheduled, batch, logits)

    def fetch_hidden_states(self, running: Items[Sequence]) -> None:
        """Fetch hidden states that drafters still need, before the next pass overwrites them."""
        if self._kept is None:
            return
        self._speculator.hidden_states.fetch(running)
        self._kept.retire()
        self._kept = None

    def _choose_rows(self, part: Scheduled) -> None:
        """Set a part's tree, or the positions to run again for their hidden states."""
        part.wants_hidden_states = self._speculator.hidden_states.is_wanted(part.sequence)
        if part.was_decoding:
            draft = self._speculator.trees.of(part.sequence)
            if draft is not None and draft.tree.num_nodes <= part.max_nodes:
                part.draft = draft
        elif part.sequence.num_computed != part.sequence.hidden_states.end:
            # A drafter needs the hidden states at the end of a cached prefix, and nobody has kept
            # them.
            part.num_rerun = self._speculator.hidden_states.num_rerun(part.sequence)

    def _verify(self, scheduled: list[Scheduled], batch: StepBatch, logits: torch.Tensor) -> None:
        """Sample and walk each sequence's rows, then commit. ``logits``: float32 [rows, vocab]."""
        walks: list[Walk] = []
        for part, logit_start in zip(scheduled, batch.logit_starts[:-1], strict=True):
            sequence, first_row = part.sequence, logit_start
            if sequence.wants_prompt_logprobs and sequence.num_computed < sequence.num_prompt_tokens:
                first_row = self._take_prompt_logprobs(part, logits, first_row)
            if part.samples:
                tree = part.tree or DraftTree.root_only(sequence.tokens[-1])
                walks.append(Walk(sequence, tree, first_row, part.draft.sources if part.draft is not None else None))
        walked = iter(self._walker.walk(walks, logits))
        results = [next(walked) if part.samples else None for part in scheduled]
        self._keep_hidden_states(scheduled, batch, results)
        self._commit_all(scheduled, results)

    def _take_prompt_logprobs(self, part: Scheduled, logits: torch.Tensor, first_row: int) -> int:
        """Store a chunk's prompt logprobs, and return the first row that is left for sampling."""
        sequence = part.sequence
        first = sequence.num_computed
        known = min(part.num_tokens, sequence.num_prompt_tokens - 1 - first)
        wanted = sequence.sampling.prompt_logprobs
        assert wanted is not None
        if known > 0:
            following = sequence.tokens[first + 1 : first + 1 + known]
            rows = logits[first_row : first_row + known]
            sequence.prompt_logprobs.entries.extend(self._walker.logprobs(rows, following, wanted))
        return first_row + part.num_tokens - 1

    def _keep_hidden_states(
        self, scheduled: list[Scheduled], batch: StepBatch, results: list[WalkResult | None]
    ) -> None:
        """Keep the hidden states of computed tokens and accepted nodes for the drafters."""
        kept: list[tuple[Scheduled, int]] = []
        rows: list[int] = []
        for part, row_start, result in zip(scheduled, batch.row_starts, results, strict=True):
            if part.wants_hidden_states:
                end = row_start + part.num_rerun + part.num_tokens
                # The tree's nodes follow the tokens, and the last token is the root.
                nodes = [end - 1 + node for node in result.accepted_nodes] if result is not None else []
                kept.append((part, len(rows)))
                rows += [*range(row_start, end), *nodes]
        if not kept:
            return
        self._kept = PassHiddenStates(rows, self._runner.hidden_states, self._runner.fetch_hidden_states)
        ends = [first for _, first in kept[1:]] + [len(rows)]
        for (part, first), end in zip(kept, ends, strict=True):
            found = HiddenSlice(self._kept, first, end)
            part.sequence.hidden_states.append(part.sequence.num_computed - part.num_rerun, found)

    def _commit_all(self, scheduled: list[Scheduled], results: list[WalkResult | None]) -> None:
        """Commit each part's walk; then move the KV entries of all accepted nodes in one call."""
        source_kv_slots: list[int] = []
        target_kv_slots: list[int] = []
        for part, result in zip(scheduled, results, strict=True):
            if _has_broken_prompt_logprobs(part.sequence):
                self._lifecycle.fail(part.sequence, broken_logits())
                continue
            if result is None:
                self._lifecycle.advance(part.sequence, part.num_tokens)
                continue
            moved = commit_kv_slots(part.sequence, result.accepted_nodes, self._blocks.block_size)
            source_kv_slots.extend(moved[0])
            target_kv_slots.extend(moved[1])
            self._commit(part, result)
        if source_kv_slots:
            self._runner.commit(np.array(source_kv_slots, np.int32), np.array(target_kv_slots, np.int32))

    def _commit(self, part: Scheduled, result: WalkResult) -> None:
        if not part.was_decoding:
            self._lifecycle.append(part.sequence, part.num_tokens, result)
            return
        shares: tuple[DrafterShare, ...] = ()
        tree = None
        if part.draft is not None:
            shares = part.draft.shares(result.matched_nodes)
            self._speculator.outcomes.observe(part.sequence, part.draft, result.matched_nodes, shares)
            if part.sequence.submission.returns_trees:
                tree = part.draft.verified(result.accepted_nodes)
        elif (passed_over := self._speculator.trees.passed_over(part.sequence)) is not None:
            self._speculator.outcomes.observe_passed_over(part.sequence, passed_over, result.tokens)
        self._lifecycle.commit_decode(part.sequence, result, shares, self._speculator.fallbacks.of_step, tree)


def _has_broken_prompt_logprobs(sequence: Sequence) -> bool:
    """Return whether unsent prompt logprobs come from logits that are NaN or infinite."""
    entries = sequence.prompt_logprobs.entries
    return sequence.wants_prompt_logprobs and any(math.isnan(entry.logprob) for entry in entries)
