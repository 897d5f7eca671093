"""Run the target model on the CPU: load it, run flat batches, move accepted KV entries.

This module knows no sequences, no scheduling and no sampling.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import foretoken_kernels
import numpy as np
import torch
from foretoken_kernels.cpu.kv_commit import kv_commit
from numpy.typing import NDArray

import foretoken
import verifier_svc
from foretoken.errors import ConfigError, PreconditionError
from foretoken.kv_cache import KVCache, kv_bytes_per_token
from foretoken.models.backend import CPU, Backend, device_name
from foretoken.models.batch import ForwardBatch
from foretoken.models.config import ModelConfig, load_config
from foretoken.models.decoder_weights import Progress, load_decoder_weights
from foretoken.models.element_type import DType, element_type
from foretoken.models.kept_checks import KeptCheck, machine_facts
from foretoken.models.llama import HostLlama
from foretoken.models.row_check import rows_are_independent, rows_look_independent
from foretoken.models.target_weights import TargetWeights
from foretoken.models.weights import Checkpoint, hash_files
from foretoken.sampling import SAMPLER_VERSION
from foretoken.transports.shared_weights import SharedWeights
from verifier_svc.sampling.grammar import LLGUIDANCE_VERSION

_log = logging.getLogger(__name__)


def silent(_done: int, _total: int, _what: str) -> None:
    """Ignore progress."""


class TargetModel:
    """The weights and the KV cache of the target, on any device: the base of both runners.

    Args:
        path: checkpoint folder in Hugging Face's layout.
        dtype: element type of matrices and cache, as foretoken.models.element_type.
        block_size: KV slots of one block.
        num_blocks: blocks of the cache.
        context_length: tokens of context. 0: the checkpoint's.
        progress: called with (done, total, what) while weights load.

    Raises:
        ConfigError: the model has an unsupported feature, which the error names, or
            ``context_length`` exceeds the checkpoint's.
        CheckpointError: a file or tensor cannot be loaded; the error names it.

    Attributes:
        config: the model's sizes. ``config.vocab_size`` is the width of the logits, and
            ``config.eos_token_ids`` end a text.
        max_model_len: tokens of context.
        mode: "strict" if ``warm_up`` found that a row's logits have the same bits in any batch.
        weights: the loaded weights.
        target_weights: the weights that drafters use: embedding and head.
        shared_weights: the memory of ``target_weights`` for drafters in other processes. None where
            GPU memory cannot be shared.
        cache: ``num_blocks`` blocks and one more: rows that run again write to this scratch block.
    """

    def __init__(
        self,
        path: Path,
        *,
        dtype: DType = "auto",
        backend: Backend = CPU,
        block_size: int = 16,
        num_blocks: int,
        context_length: int = 0,
        progress: Progress = silent,
    ) -> None:
        self.config: ModelConfig = load_config(path)
        self.max_model_len = context_tokens(self.config, context_length)
        self.dtype = element_type(dtype, backend, path)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.mode: Literal["strict", "fast"] = "fast"
        self._backend = backend
        with Checkpoint(path) as checkpoint:
            self.weights = load_decoder_weights(self.config, checkpoint, self.dtype, progress, backend)
            # The hash covers the tokenizer, which decides the ids that may be sampled or fit a
            # grammar.
            tokenizer = [file for file in (path / "tokenizer.json",) if file.is_file()]
            self.checkpoint_hash = hash_files([path / "config.json", *tokenizer, *checkpoint.files])
        self.weights_bytes = self.weights.num_bytes
        # Before the cache exists, since this briefly holds embedding and head twice.
        self._share_weights(backend)
        self.cache = KVCache(
            self.config.num_layers,
            num_blocks + 1,
            block_size,
            self.config.num_kv_heads,
            self.config.head_dim,
            self.dtype,
            backend.device,
        )

    def _share_weights(self, backend: Backend) -> None:
        """Move embedding and head to memory that other processes can map."""
        self.target_weights = TargetWeights.of(self.config, self.weights)
        self.shared_weights: SharedWeights | None = None
        try:
            self.shared_weights = SharedWeights(self.target_weights, backend)
        except PreconditionError as error:
            _log.warning("drafters' processes read embedding and head from the checkpoint, a copy each: %s", error)
            return
        self.target_weights = self.shared_weights.weights
        self.weights = replace(self.weights, embedding=self.target_weights.embedding, head=self.target_weights.head)
        if backend.device.type == "cuda":
            # Free the old copies, because the memory plan counts one.
            torch.cuda.empty_cache()

    @property
    def fingerprint(self) -> str:
        """Return a hex SHA-256 of all that decides the generated text.

        It covers checkpoint, tokenizer, dtype, mode, sampler version and llguidance version.
        Runners that generate the same text have the same fingerprint. It is final after
        ``warm_up``. Strict numerics differ between a CPU and each kind of GPU, so the mode names
        the kind of GPU.
        """
        dtype = str(self.dtype).removeprefix("torch.")
        mode: str = self.mode
        if mode == "strict" and self._backend.kernels == "gpu":
            mode = f"strict in GPU kernels on {device_name(self._backend)}"
        content = f"{self.checkpoint_hash} {dtype} {mode} {SAMPLER_VERSION} {LLGUIDANCE_VERSION}"
        return hashlib.sha256(content.encode()).hexdigest()

    def set_mode(self, independent: bool, seconds: float) -> None:
        """Set ``mode`` by the result of the row check, which took ``seconds``, and log it."""
        self.mode = "strict" if independent else "fast"
        if independent:
            _log.info("numerics: strict; a row has the same bits in any batch (checked in %.2f s)", seconds)
        else:
            _log.warning(
                "numerics: fast; a row's bits depend on its batch here, so near-ties may flip with speculation"
            )

    def check_kv_slots(self, src_kv_slots: NDArray[np.int32], dst_kv_slots: NDArray[np.int32]) -> None:
        """Raise ValueError if the arrays differ in length, or a KV slot is out of range."""
        if len(src_kv_slots) != len(dst_kv_slots):
            raise ValueError("src_kv_slots and dst_kv_slots differ in length")
        for kv_slots in (src_kv_slots, dst_kv_slots):
            if len(kv_slots) and not 0 <= kv_slots.min() <= kv_slots.max() < self.num_blocks * self.block_size:
                raise ValueError(f"a KV slot is not in [0, {self.num_blocks * self.block_size})")


class ModelRunner(TargetModel):
    """The target model with its KV cache on the CPU. Any thread may build it; one thread calls it.

    Arithmetic is float32 for every ``dtype``. TargetModel describes the other arguments and
    attributes, and the errors.

    Args:
        threads: threads of a forward pass, including the caller's. 0: ``default_threads()``.
    """

    def __init__(self, path: Path, *, threads: int = 0, **options: Any) -> None:
        super().__init__(path, **options)
        self.threads = threads or default_threads()
        # A prompt may use all cores: drafters wait for it, and the gateway has little to do.
        self.wide_threads = threads or len(os.sched_getaffinity(0))
        self.mode = "strict"
        self._planes = (
            self.cache.data.view(_plain(self.dtype))
            .numpy()
            .reshape(2 * self.config.num_layers, self.cache.num_kv_slots, -1)
        )
        self._model = HostLlama(
            self.config, self.weights, self.cache, self.max_model_len, self.threads, self.wide_threads
        )

    @property
    def hidden_states(self) -> torch.Tensor:
        """Return the last pass's hidden states, float32 [rows, captured * hidden_size].

        They are valid until the next call.
        """
        return self._model.hidden_states

    def fetch_hidden_states(self, rows: list[int]) -> NDArray[np.float32]:
        """Copy these rows of ``hidden_states``, float32 [len(rows), captured * hidden_size]."""
        first, last = rows[0], rows[-1]
        hidden_states: NDArray[np.float32] = self._model.hidden_states.numpy()
        if last - first + 1 == len(rows):
            return hidden_states[first : last + 1].copy()
        return hidden_states[rows]

    def forward(self, batch: ForwardBatch, captured_layers: tuple[int, ...] = ()) -> torch.Tensor:
        """Run a batch and return its logits, float32 [len(batch.logit_rows), vocab_size].

        They are valid until the next call. The pass writes the KV entries of all rows before any
        row attends.

        Args:
            captured_layers: layers whose hidden states to capture for all rows
                (foretoken.drafting.FINAL_NORM).

        Raises:
            ValueError: an index of the batch is out of range; nothing was written.
        """
        return self._model.forward(batch, captured_layers)

    def commit(self, src_kv_slots: NDArray[np.int32], dst_kv_slots: NDArray[np.int32]) -> None:
        """Copy KV entries from ``src_kv_slots`` to ``dst_kv_slots`` one by one, in all layers.

        Along a path, ``dst_kv_slots[i] <= src_kv_slots[i]`` in logical order, so each KV slot is
        read before it is overwritten.

        Raises:
            ValueError: the arrays differ in length, or a KV slot is out of range.
        """
        self.check_kv_slots(src_kv_slots, dst_kv_slots)
        kv_commit(self._planes, src_kv_slots, dst_kv_slots)

    def warm_up(self, progress: Progress = silent, checks: Path | None = None) -> None:
        """Compile kernels, touch all buffers, check that rows are independent, set ``mode``.

        Call it before the first sequence: it writes noise to the cache.

        ``checks``: a file of checks that earlier starts have passed; this one counts again if
        nothing has changed on which it depends, and a few rows still pass.
        """
        start = time.perf_counter()
        most = min(self.cache.num_kv_slots, self.max_model_len)
        kept = None if checks is None else KeptCheck(checks, self._check_facts(most))
        passed_at = None if kept is None else kept.passed_at()
        if kept is not None and passed_at is not None:
            if rows_look_independent(self._model.forward, self.config, self.block_size, most):
                self.mode = "strict"
                seconds = time.perf_counter() - start
                where = f"{passed_at}, by {kept.path}"
                _log.info("numerics: strict, as checked at %s; a few rows checked again in %.2f s", where, seconds)
                return
            _log.warning("a kept check of numerics does not hold any more: checking all rows again")
        independent = rows_are_independent(self._model.forward, self.config, self.block_size, most, progress)
        self.set_mode(independent, time.perf_counter() - start)
        if kept is not None:
            kept.keep() if independent else kept.forget()

    def _check_facts(self, most_tokens: int) -> dict[str, str]:
        """Return everything that the row check's result depends on."""
        model = {
            "checkpoint": self.checkpoint_hash,
            "dtype": str(self.dtype),
            "sizes": f"{self.block_size} {most_tokens} {self.max_model_len}",
            "team": f"{self.threads} {self.wide_threads}",
        }
        packages = (foretoken.__file__, foretoken_kernels.__file__, verifier_svc.__file__)
        return model | machine_facts(Path(file).parent for file in packages if file)


def default_threads() -> int:
    """Return the number of cores minus one, at least 1.

    One core is left to gateway, drafters and clients. If they take a core from one thread of a
    pass, all its threads wait, which costs far more than that core gains.
    """
    return max(len(os.sched_getaffinity(0)) - 1, 1)


def cache_bytes_per_token(config: ModelConfig, element: torch.dtype) -> int:
    """Return the cache bytes of one token in a TargetModel of this element type."""
    return kv_bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, element)


def context_tokens(config: ModelConfig, wanted: int) -> int:
    """Return the tokens of context: ``wanted``, or the checkpoint's if that is 0.

    Raises ConfigError if the checkpoint has fewer.
    """
    if wanted > config.max_position_embeddings:
        raise ConfigError(
            f"--context-length {wanted} is more than this checkpoint's {config.max_position_embeddings} tokens"
        )
    return wanted or config.max_position_embeddings


def _plain(dtype: torch.dtype) -> torch.dtype:
    """Return a type of the same size that numpy and numba have.

    numpy has no bfloat16, numba no float16.
    """
    return torch.uint16 if dtype.itemsize == 2 else dtype
