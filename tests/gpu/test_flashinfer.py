"""FlashInfer as the target's attention on a GPU equals the definition and Triton's kernels.

Its plans alone, without FlashInfer: tests/foretoken/test_flashinfer_attention.py.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from foretoken.kv_cache import KVCache
from foretoken.models.backend import Backend
from foretoken.models.batch import ForwardBatch, chain_batch
from foretoken.models.config import load_config
from foretoken.models.decoder_weights import load_decoder_weights
from foretoken.models.device_llama import DeviceLlama
from foretoken.models.device_sizes import PassSizes
from foretoken.models.flashinfer_attention import FlashInferAttention, obstacle
from foretoken.models.weights import Checkpoint
from foretoken.tree import ancestor_mask, depths
from tests.kernels.attention_cases import Heads, Rows, case, prefill, rooted, tree
from tests.support.planned_case import attend, config_of
from tests.support.tiny_checkpoint import save_llama
from verifier_svc.config import VerifierSettings
from verifier_svc.model.runner import silent
from verifier_svc.model.target import memory_plan
from verifier_svc.target_loading import load_target

# FlashInfer and its compilers give these warnings.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]
BLOCK = 16
CHUNK, BRANCHES = 300, [-1, 0, 0, 1, 1, 2, 3]


@pytest.fixture(scope="module", autouse=True)
def _there() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("flashinfer", exc_type=ImportError)


@pytest.mark.parametrize(
    "heads", [(32, 8, 128), (28, 4, 128), (4, 2, 64), (8, 2, 256)], ids=["32x128", "28x128", "4x64", "8x256"]
)
@pytest.mark.parametrize(
    ("block_size", "dtype"),
    [(1, torch.bfloat16), (16, torch.bfloat16), (24, torch.bfloat16), (16, torch.float16)],
)
def test_attention_is_the_defined_one(
    heads: Heads, block_size: int, dtype: torch.dtype, tmp_path: Path, device: str
) -> None:
    """Trees come after and before several sequences' prompts; unseen KV slots hold NaN."""
    generator = np.random.default_rng(block_size)
    seqs = [
        rooted(tree(320, 32, generator)),
        rooted(tree(7, 64, generator)),
        Rows([(533, 0)], 532),
        prefill(1000, 129),
        prefill(0, 200),
        tree(90, 100, generator),
        prefill(40, 3),
    ]
    config = config_of(heads, tmp_path)
    assert obstacle(config, dtype, torch.device(device)) is None
    batch = case(seqs, heads, block_size, device, dtype, words=2, seed=block_size)
    found, expected = attend(batch, config).double(), batch.defined().to(device)
    assert found.isfinite().all()
    error = (found - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    assert error.max() < (1e-2 if dtype == torch.bfloat16 else 2e-3)


def mixed_batch() -> ForwardBatch:
    """Return a tree after a computed prompt, beside another sequence's first chunk.

    It wants the logits of the tree and of the chunk's last row.
    """
    prompt, tail = chain_batch(np.arange(CHUNK, dtype=np.int32) % 60, 0, BLOCK), np.array(BRANCHES, np.int32)
    own = -(-(CHUNK + len(tail)) // BLOCK)
    root, nodes = CHUNK, np.arange(len(tail), dtype=np.int32)
    masks = ancestor_mask(tail)
    masks[:, 0] &= ~np.uint64(1)
    tables = np.arange(2 * own, dtype=np.int32).reshape(2, own)
    return ForwardBatch(
        token_ids=np.concatenate([nodes + 7, prompt.token_ids]),
        positions=np.concatenate([root + depths(tail), prompt.positions]),
        kv_slots=np.concatenate([root + nodes, own * BLOCK + prompt.positions]),
        row_seqs=np.repeat(np.arange(2, dtype=np.int32), (len(tail), CHUNK)),
        context_lens=np.concatenate([np.full(len(tail), root + 1, np.int32), prompt.context_lens]),
        masks=np.concatenate([masks, prompt.masks]),
        tree_starts=np.array([root, 0], np.int32),
        block_tables=tables,
        logit_rows=np.array([*nodes, len(tail) + CHUNK - 1], np.int32),
    )


def test_a_models_passes_are_those_of_tritons_kernels(tmp_path: Path, device: str) -> None:
    """Logits and KV entries are equal for a prompt in two chunks and for a tree beside a chunk.

    The passes run twice in a row, without a wait, since plans share memory with earlier ones.
    """
    # Attention changes a good part of the residual, but no score is so large that one key wins.
    folder = save_llama(tmp_path, std=0.08, hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    config, backend = load_config(folder), Backend("gpu", torch.device(device))
    tokens = np.arange(CHUNK, dtype=np.int32) * 7 % 60
    last = np.array([149], np.int32)
    batches = [chain_batch(tokens[:150], 0, BLOCK, last), chain_batch(tokens[150:], 150, BLOCK, last), mixed_batch()]
    with Checkpoint(folder) as checkpoint:
        weights = load_decoder_weights(config, checkpoint, torch.bfloat16, lambda *_: None, backend)
    sizes = PassSizes(512, 16, 4, 64, graphs=False)
    found: list[list[torch.Tensor]] = []
    for taken in (None, False, True):
        heads = config.num_kv_heads, config.head_dim
        cache = KVCache(config.num_layers, 64, BLOCK, *heads, torch.bfloat16, backend.device)
        cache.data.zero_()
        planned = None if taken is None else FlashInferAttention(config, cache, every_pass=taken)
        model = DeviceLlama(config, weights, cache, 512, sizes, flashinfer=planned)
        results = []
        for _ in range(2):
            results += [model.forward(batch).clone() for batch in batches]
        results.append(cache.data.float())
        found.append(results)
    for planned_results in found[1:]:
        for expected, have in zip(found[0], planned_results, strict=True):
            assert have.isfinite().all()
            assert (have - expected).norm() / expected.norm() < 2e-2


@pytest.mark.parametrize("wanted", ["auto", "flashinfer"])
def test_a_verifier_takes_it(wanted: Literal["auto", "flashinfer"], tmp_path: Path, device: str) -> None:
    """It is compiled, warmed up and in the memory plan; only unplanned steps overlap."""
    folder = save_llama(tmp_path, hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    settings = VerifierSettings(
        model=folder,
        served_model_name="tiny",
        address="unix:/none",
        attention_backend=wanted,
        max_total_tokens=2048,
        max_running_requests=4,
        chunked_prefill_size=2048,
        speculative_num_draft_tokens=8,
    )
    backend = Backend("gpu", torch.device(device))
    target = load_target(settings, memory_plan(settings, backend), backend, silent)
    assert (target.overlap_runs is None) == (wanted == "flashinfer")
    logits = target.runner.forward(
        chain_batch(np.arange(200, dtype=np.int32) % 60, 0, BLOCK, np.array([199], np.int32))
    )
    assert logits.isfinite().all()
