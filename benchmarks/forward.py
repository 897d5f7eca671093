"""Time forward passes by row count, steps of an EAGLE-3 head, and one-token decode of transformers.

    python benchmarks/forward.py [--threads 2] [--dtype float32] [--weights bfloat16]

All use the same random weights. A decode row attends to 400 positions. Rows of ``tree`` are nodes
of one tree; rows of ``batch`` are separate sequences. The head has one layer of the target's width,
and the target's vocabulary. Times are medians and minima of many passes, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "kernels")]

from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM  # noqa: E402

from foretoken.models.batch import ForwardBatch  # noqa: E402
from foretoken.models.config import load_config  # noqa: E402
from foretoken.models.draft_head import HostDraftHead, load_head  # noqa: E402
from foretoken.models.draft_weights import HeadSource  # noqa: E402
from foretoken.models.target_weights import load_target_weights  # noqa: E402
from foretoken.tree import ancestor_mask  # noqa: E402
from verifier_svc.model.runner import ModelRunner  # noqa: E402

CONTEXT = 400
PREFILL = 300
BLOCK_SIZE = 16
BLOCKS_PER_SEQ = 32


def demo_shape() -> LlamaConfig:
    """Return the shape of the bundled demo model."""
    return LlamaConfig(
        vocab_size=8192,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )


def tree_batch(num_nodes: int) -> ForwardBatch:
    """Return a batch of one sequence whose tree is a chain with its root at position 400."""
    nodes = np.arange(num_nodes, dtype=np.int32)
    return ForwardBatch(
        token_ids=nodes + 1,
        positions=CONTEXT + nodes,
        kv_slots=CONTEXT + nodes,
        row_seqs=np.zeros(num_nodes, np.int32),
        context_lens=np.full(num_nodes, CONTEXT, np.int32),
        masks=ancestor_mask(nodes - 1),
        tree_starts=np.array([CONTEXT], np.int32),
        block_tables=np.arange(BLOCKS_PER_SEQ, dtype=np.int32)[None],
        logit_rows=nodes,
    )


def plain_batch(num_seqs: int) -> ForwardBatch:
    """Return a batch of ``num_seqs`` sequences with one decode row each, at position 400."""
    seqs = np.arange(num_seqs, dtype=np.int32)
    return ForwardBatch(
        token_ids=seqs + 1,
        positions=np.full(num_seqs, CONTEXT, np.int32),
        kv_slots=seqs * BLOCKS_PER_SEQ * BLOCK_SIZE + CONTEXT,
        row_seqs=seqs,
        context_lens=np.full(num_seqs, CONTEXT, np.int32),
        masks=np.ones((num_seqs, 1), np.uint64),
        tree_starts=np.full(num_seqs, CONTEXT, np.int32),
        block_tables=np.arange(num_seqs * BLOCKS_PER_SEQ, dtype=np.int32).reshape(num_seqs, BLOCKS_PER_SEQ),
        logit_rows=seqs,
    )


def prefill_batch(length: int, first: int = 0) -> ForwardBatch:
    """Return a prefill batch of ``length`` tokens from position ``first``, with its last logits."""
    positions = np.arange(first, first + length, dtype=np.int32)
    return ForwardBatch(
        token_ids=positions % 8192,
        positions=positions,
        kv_slots=positions,
        row_seqs=np.zeros(length, np.int32),
        context_lens=positions + 1,
        masks=np.zeros((length, 1), np.uint64),
        tree_starts=np.zeros(1, np.int32),
        block_tables=np.arange(BLOCKS_PER_SEQ, dtype=np.int32)[None],
        logit_rows=np.array([length - 1], np.int32),
    )


def measure(step: Callable[[], object], repeats: int) -> str:
    """Return ``median (min)`` in ms."""
    for _ in range(5):
        step()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    return f"{statistics.median(times):8.2f} ({min(times):.2f})"


def measure_runner(runner: ModelRunner) -> None:
    for name, build in (("tree", tree_batch), ("batch", plain_batch)):
        for rows in (1, 2, 4, 8, 16, 32):
            step = partial(runner.forward, build(rows))
            print(f"{name:>12} {rows:4d} rows {measure(step, 100)} ms")
    for rows in (64, PREFILL):
        step = partial(runner.forward, prefill_batch(rows))
        print(f"{'prefill':>12} {rows:4d} rows {measure(step, 15)} ms")


def random_head(target: Path, folder: Path, threads: int) -> HostDraftHead:
    """Return an EAGLE-3 head that shares the embedding and output head of the target."""
    config = load_config(target)
    size, queries, keys = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {"fc": (size, 3 * size), "midlayer.self_attn.o_proj": (size, queries)}
    shapes |= {f"midlayer.self_attn.{n}_proj": (out, 2 * size) for n, out in (("q", queries), ("k", keys), ("v", keys))}
    shapes |= {f"midlayer.mlp.{name}_proj": (config.intermediate_size, size) for name in ("gate", "up")}
    shapes["midlayer.mlp.down_proj"] = (size, config.intermediate_size)
    tensors = {f"{name}.weight": 0.02 * torch.randn(shape) for name, shape in shapes.items()}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = torch.ones(size)
    tensors["norm.weight"] = torch.ones(size)
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors")
    fields = json.loads((target / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**fields, "num_hidden_layers": 1, "draft_vocab_size": None, "tie_word_embeddings": False})
    )
    source = HeadSource(folder, config, load_target_weights(target, config), torch.float32)
    return HostDraftHead(load_head(source, BLOCKS_PER_SEQ, BLOCK_SIZE), 1024, threads)


def measure_head(head: HostDraftHead) -> None:
    """Measure recurrent steps over nodes of one tree, and reading a prompt."""
    hidden_states = np.zeros((CONTEXT, head.hidden_width), np.float32)
    head.forward(prefill_batch(CONTEXT, 1), hidden_states, from_target=True)
    for rows in (1, 2, 4, 8):
        state = np.zeros((rows, head.hidden_size), np.float32)
        step = partial(head.forward, tree_batch(rows), state, from_target=False)
        print(f"{'head':>12} {rows:4d} rows {measure(step, 200)} ms")
    step = partial(head.forward, prefill_batch(PREFILL, 1), hidden_states[:PREFILL], from_target=True)
    print(f"{'head prompt':>12} {PREFILL:4d} rows {measure(step, 15)} ms")


@torch.inference_mode()
def measure_transformers(model: LlamaForCausalLM, rows: int) -> str:
    """Measure one-token steps of ``rows`` sequences over a cache of 400 positions.

    The cache is cut back after each step.
    """
    cache = DynamicCache(config=model.config)
    model(torch.ones((rows, CONTEXT), dtype=torch.long), past_key_values=cache, logits_to_keep=1)
    token = torch.ones((rows, 1), dtype=torch.long)

    def step() -> None:
        model(token, past_key_values=cache)
        cache.crop(-1)

    return measure(step, 60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--weights", choices=("float32", "bfloat16"), default="bfloat16", help="as stored on disk")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = LlamaForCausalLM(demo_shape()).to(getattr(torch, options.weights)).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        (Path(folder) / "head").mkdir()
        head = random_head(Path(folder), Path(folder) / "head", options.threads)
        runner = ModelRunner(
            Path(folder),
            dtype=options.dtype,
            threads=options.threads,
            block_size=BLOCK_SIZE,
            num_blocks=32 * BLOCKS_PER_SEQ,
        )
    runner.warm_up()
    print(f"{options.threads} threads, {options.dtype}, weights stored as {options.weights}; median (min)")
    measure_runner(runner)
    measure_head(head)
    model = model.to(getattr(torch, options.dtype))
    for rows in (1, 8):
        print(f"transformers {rows:4d} rows {measure_transformers(model, rows)} ms")
    prompt = torch.ones((1, PREFILL), dtype=torch.long)
    with torch.inference_mode():
        print(f"transformers {PREFILL:4d} rows {measure(lambda: model(prompt, logits_to_keep=1), 10)} ms")


if __name__ == "__main__":
    main()
