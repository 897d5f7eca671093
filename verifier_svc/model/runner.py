"""The target model of one verifier on the CPU: loads it, runs it over flat batches, moves accepted keys and values.

Knows nothing of sequences, scheduling or sampling.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from foretoken_kernels.cpu.kv_commit import kv_commit
from numpy.typing import NDArray

from foretoken.errors import ConfigError, PreconditionError
from foretoken.kv_cache import KVCache, kv_bytes_per_token
from foretoken.models.backend import CPU, Backend, default_dtype, device_name
from foretoken.models.batch import ForwardBatch
from foretoken.models.config import ModelConfig, load_config
from foretoken.models.decoder_weights import Progress, load_decoder_weights
from foretoken.models.llama import HostLlama
from foretoken.models.row_check import rows_are_independent
from foretoken.models.target_weights import TargetWeights
from foretoken.models.weights import Checkpoint, hash_files
from foretoken.sampling import SAMPLER_VERSION
from foretoken.transports.shared_weights import SharedWeights
from verifier_svc.sampling.grammar import LLGUIDANCE_VERSION

DType = Literal["auto", "float32", "bfloat16"]

_log = logging.getLogger(__name__)


def silent(_done: int, _total: int, _what: str) -> None:
    """No progress shown."""


class TargetModel:
    """What a runner of the target is built from, whatever it runs on.

    Args:
        path: checkpoint folder in Hugging Face's layout.
        dtype: element type of the matrices and the cache; "auto" is float32 on a CPU, bfloat16 on a GPU.
        context_length: tokens of context; 0 is what the checkpoint says.
        progress: called with (done, total, what) while weights are loaded.

    Raises:
        ConfigError: an unsupported feature, by name, or a context longer than the checkpoint's.
        CheckpointError: a file or tensor that cannot be loaded, by name.

    Attributes:
        config: the model's sizes; ``config.vocab_size`` is the width of the logits, ``config.eos_token_ids`` ends text.
        max_model_len: tokens of context.
        mode: "strict" if a row's logits have the same bits in any batch, as ``warm_up`` has checked.
        weights: as loaded.
        target_weights: those of them that drafters use: embedding and head.
        shared_weights: the memory that these two are in, for drafters of other processes; None where GPU memory cannot
            be shared.
        cache: one block more than ``num_blocks``: the last one is scratch, where rows that are run again write.
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
        self.dtype = element_type(dtype, backend)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.mode: Literal["strict", "fast"] = "fast"
        self._backend = backend
        with Checkpoint(path) as checkpoint:
            self.weights = load_decoder_weights(self.config, checkpoint, self.dtype, progress, backend)
            # The tokenizer decides which ids may be sampled, and which ones a grammar allows.
            tokenizer = [file for file in (path / "tokenizer.json",) if file.is_file()]
            self._checkpoint_hash = hash_files([path / "config.json", *tokenizer, *checkpoint.files])
        self.weights_bytes = self.weights.num_bytes
        # Before there is a cache: for a moment the two are there twice.
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
            # The memory plan counts them once.
            torch.cuda.empty_cache()

    @property
    def kv_bytes(self) -> int:
        """Bytes of the cache."""
        return self.cache.num_bytes

    @property
    def fingerprint(self) -> str:
        """Hex sha256 over checkpoint and tokenizer, dtype, mode, sampler version and llguidance's version.

        Equal for runners whose text is the same; final once ``warm_up`` has returned. What is strict on a GPU is not
        what is strict on a CPU, or on a GPU of another kind.
        """
        dtype = str(self.dtype).removeprefix("torch.")
        mode: str = self.mode
        if mode == "strict" and self._backend.kernels == "gpu":
            mode = f"strict in GPU kernels on {device_name(self._backend)}"
        content = f"{self._checkpoint_hash} {dtype} {mode} {SAMPLER_VERSION} {LLGUIDANCE_VERSION}"
        return hashlib.sha256(content.encode()).hexdigest()

    def set_mode(self, independent: bool, seconds: float) -> None:
        """As the check of rows has found in so many seconds."""
        self.mode = "strict" if independent else "fast"
        if independent:
            _log.info("numerics: strict; a row has the same bits in any batch (checked in %.2f s)", seconds)
        else:
            _log.warning(
                "numerics: fast; a row's bits depend on its batch here, so near-ties may flip with speculation"
            )

    def check_slots(self, src_slots: NDArray[np.int32], dst_slots: NDArray[np.int32]) -> None:
        """Raise ValueError if the arrays differ in length or name a slot that is not there."""
        if len(src_slots) != len(dst_slots):
            raise ValueError("src_slots and dst_slots differ in length")
        for slots in (src_slots, dst_slots):
            if len(slots) and not 0 <= slots.min() <= slots.max() < self.num_blocks * self.block_size:
                raise ValueError(f"a slot is not in [0, {self.num_blocks * self.block_size})")


class ModelRunner(TargetModel):
    """The target model with its cache, on the CPU. One thread calls it, any thread may build it.

    Arithmetic is float32 whatever ``dtype``. Other arguments, errors and attributes as TargetModel.

    Args:
        threads: of a forward pass, the calling one counted; 0 is ``default_threads()``.
    """

    def __init__(
        self,
        path: Path,
        *,
        dtype: DType = "auto",
        threads: int = 0,
        block_size: int = 16,
        num_blocks: int,
        context_length: int = 0,
        progress: Progress = silent,
    ) -> None:
        super().__init__(
            path,
            dtype=dtype,
            block_size=block_size,
            num_blocks=num_blocks,
            context_length=context_length,
            progress=progress,
        )
        self.threads = threads or default_threads()
        # While a prompt is computed drafters wait, and the gateway has little to do.
        self.wide_threads = threads or len(os.sched_getaffinity(0))
        self.mode = "strict"
        self._planes = (
            self.cache.data.view(_plain(self.dtype))
            .numpy()
            .reshape(2 * self.config.num_layers, self.cache.num_slots, -1)
        )
        self._model = HostLlama(
            self.config, self.weights, self.cache, self.max_model_len, self.threads, self.wide_threads
        )

    @property
    def features(self) -> torch.Tensor:
        """float32 [rows, captured * hidden_size] of the last pass; valid until the next call."""
        return self._model.features

    def feature_rows(self, rows: list[int]) -> NDArray[np.float32]:
        """float32 [len(rows), captured * hidden_size] of the last pass: a copy."""
        first, last = rows[0], rows[-1]
        features: NDArray[np.float32] = self._model.features.numpy()
        if last - first + 1 == len(rows):
            return features[first : last + 1].copy()
        return features[rows]

    def forward(self, batch: ForwardBatch, features: tuple[int, ...] = ()) -> torch.Tensor:
        """float32 [len(batch.logit_rows), vocab_size]; valid until the next call.

        All rows' keys and values are written before any row attends. ``features``: hidden states to capture for all
        rows (foretoken.drafting.FINAL_NORM).

        Raises:
            ValueError: an index of the batch is out of range; nothing was written.
        """
        return self._model.forward(batch, features)

    def commit(self, src_slots: NDArray[np.int32], dst_slots: NDArray[np.int32]) -> None:
        """Copy keys and values of slot ``src_slots[i]`` to ``dst_slots[i]`` in all layers, in ascending i.

        Along a path ``dst_slots[i] <= src_slots[i]`` in logical order, so a slot is read before it is overwritten.

        Raises:
            ValueError: the arrays differ in length or name a slot that is not there.
        """
        self.check_slots(src_slots, dst_slots)
        kv_commit(self._planes, src_slots, dst_slots)

    def warm_up(self, progress: Progress = silent) -> None:
        """Compile what is not yet compiled, touch all buffers, and check that rows are independent.

        Leaves noise in the cache; call it before any sequence. Sets ``mode``.
        """
        start = time.perf_counter()
        most = min(self.cache.num_slots, self.max_model_len)
        independent = rows_are_independent(self._model.forward, self.config, self.block_size, most, progress)
        self.set_mode(independent, time.perf_counter() - start)


def default_threads() -> int:
    """Cores less one, which is left to gateway, drafters and clients: a thread that waits for another one that has lost
    its core to them costs far more than the core gives."""
    return max(len(os.sched_getaffinity(0)) - 1, 1)


def element_type(dtype: DType, backend: Backend) -> torch.dtype:
    """Of the matrices and the cache of a model served with ``--dtype``."""
    return default_dtype(backend) if dtype == "auto" else getattr(torch, dtype)


def cache_bytes_per_token(config: ModelConfig, dtype: DType, backend: Backend = CPU) -> int:
    """Bytes that one token takes in the cache of a TargetModel built with ``dtype``; for the memory plan."""
    element = element_type(dtype, backend)
    return kv_bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, element)


def context_tokens(config: ModelConfig, wanted: int) -> int:
    """Tokens of context: ``wanted``, or the checkpoint's if that is 0. Raises ConfigError if it has fewer."""
    if wanted > config.max_position_embeddings:
        raise ConfigError(
            f"--context-length {wanted} is more than this checkpoint's {config.max_position_embeddings} tokens"
        )
    return wanted or config.max_position_embeddings


def _plain(dtype: torch.dtype) -> torch.dtype:
    """The type under which numpy sees a tensor's elements: it has no bfloat16."""
    return torch.uint16 if dtype == torch.bfloat16 else dtype
