"""Time attention of decode rows over long contexts, and how fast it reads KV entries.

    python -m benchmarks.gpu.long_attention

One layer of the Llama-3.1-8B shape in bfloat16, its blocks scattered over the cache. A graph has
several layers with caches of their own, so that none is in the GPU's second-level cache.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch

from benchmarks.gpu.passes import BLOCK, device_ms

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
LAYERS = 4
# Most rows of all sequences, and bytes of the caches.
MAX_ROWS, MAX_BYTES = 8192, 60e9


class Batch(NamedTuple):
    """Sequences of equal length.

    Attributes:
        rows: of each sequence, a chain.
        tiles_for: rows of one sequence that attention's tiles are chosen for.
        room: sequences that the launch has programs for, as in a graph that is larger than its
            step; 0: so many as there are.
    """

    seqs: int
    rows: int
    tiles_for: int
    room: int = 0


BATCHES = (
    *(Batch(1, 1, 1), Batch(1, 8, 8), Batch(1, 32, 32), Batch(4, 8, 8)),
    *(Batch(16, 1, 1), Batch(16, 4, 4), Batch(16, 8, 8), Batch(16, 8, 32)),
    *(Batch(64, 1, 1), Batch(64, 4, 4), Batch(64, 4, 8), Batch(64, 8, 8)),
    # As beside prompts, in graphs for up to 256 sequences with trees of up to 4, 8 and 32 rows.
    *(Batch(seqs, 4, tiles_for, 256) for seqs in (16, 24, 32, 36, 48, 64) for tiles_for in (4, 8, 32)),
    *(Batch(36, 6, tiles_for, 256) for tiles_for in (8, 32)),
)
# Tokens of context, and blocks of the table.
CONTEXTS = ((1500, 128), (2500, 256), (2500, 1024), (8500, 1024))


def layer_us(batch: Batch, context: int, table_blocks: int) -> float:
    """Return the microseconds that one layer's attention takes."""
    from foretoken_kernels.gpu.graph_capture import captured
    from foretoken_kernels.gpu.tree_attention import attention_workspace, tree_attention

    device = torch.device("cuda")
    room = batch.room or batch.seqs
    blocks, rows = -(-(context + batch.rows) // BLOCK), batch.seqs * batch.rows
    num_kv_slots = (batch.seqs * blocks + 1) * BLOCK
    planes = torch.randn(LAYERS, 2, num_kv_slots, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)

    def ints(values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.int32).contiguous()

    tables = torch.zeros(room, table_blocks, dtype=torch.int32, device=device)
    tables[: batch.seqs, :blocks] = ints(torch.randperm(batch.seqs * blocks, device=device)).view(batch.seqs, blocks)
    query = torch.randn(rows, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    out, at = torch.empty_like(query), torch.arange(rows, device=device) % batch.rows
    row_starts = ints((torch.arange(room + 1, device=device) * batch.rows).clamp(max=rows))
    context_lens = torch.full((rows,), context, dtype=torch.int32, device=device)
    masks = ((torch.ones_like(at) << (at + 1)) - 1)[:, None]
    tree_starts = torch.full((room,), context, dtype=torch.int32, device=device)
    context_starts = torch.zeros_like(tree_starts)
    workspace = attention_workspace(MAX_ROWS, HEADS, KV_HEADS, HEAD_DIM, device)

    def launch() -> None:
        for keys, values in planes:
            tree_attention(
                query,
                keys,
                values,
                row_starts,
                context_lens,
                masks,
                tree_starts,
                tables,
                context_starts,
                BLOCK,
                batch.tiles_for,
                workspace,
                out,
            )

    launch()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        graph = captured(launch)
    return device_ms(graph.replay, 10) / LAYERS * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print("| sequences | rows | tiles for | room for | context | table, blocks | us a layer | TB/s |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for batch in BATCHES:
        for context, table_blocks in CONTEXTS:
            size = batch.seqs * (context + batch.rows) * KV_HEADS * HEAD_DIM * 2 * 2
            if size * LAYERS < MAX_BYTES:
                us = layer_us(batch, context, table_blocks)
                print(f"| {' | '.join(map(str, (*batch, context, table_blocks)))} | {us:.1f} | {size / us / 1e6:.2f} |")


if __name__ == "__main__":
    main()
