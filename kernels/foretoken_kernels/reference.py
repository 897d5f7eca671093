"""Define every operation in plain PyTorch. Slow, but runs anywhere; kernels are tested against it.

Arguments are flat tensors whose lengths give the sizes, so the same signatures work on a GPU.
``num_kv_slots`` counts the KV slots of all blocks; KV slot ``b * block_size + i`` is entry i of
block b.
"""

from __future__ import annotations

import torch

_MASK_BITS = 64


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x W^T, [rows, out_features].

    Args:
        x: [rows, in_features].
        weight: [out_features, in_features].
    """
    return x @ weight.T


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return ``x / sqrt(mean(x^2) + epsilon) * weight`` over the last dimension (arXiv 1910.07467).

    Args:
        weight: [size].
    """
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def silu_and_multiply(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return ``gate * sigmoid(gate) * up``, element by element (SwiGLU, arXiv 2002.05202)."""
    return gate * torch.sigmoid(gate) * up


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate x [rows, heads, head_dim], first half against second half (RoPE, arXiv 2104.09864).

    Args:
        cos_sin: [positions, 2, head_dim / 2]: cosines, then sines.
        positions: int32 [rows].
    """
    cosine, sine = cos_sin[positions.long()][:, :, None, :].unbind(1)
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1)


def rope_kv_write(  # noqa: PLR0913 - the arguments of the kernel
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
    epsilon: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Apply bias, per-head norm and rotation; write keys and values to their KV slots.

    Args:
        qkv: [rows, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values.
        bias: [num_heads + 2 * num_kv_heads, head_dim] or None.
        query_norm, key_norm: [head_dim] or None.
        cos_sin: as for rotate.
        positions, kv_slots: int32 [rows]; ``kv_slots`` holds KV slots.
        keys, values: [num_kv_slots, num_kv_heads, head_dim]; written in place.

    Returns:
        The rotated queries, [rows, num_heads, head_dim].
    """
    num_kv_heads = keys.shape[1]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    if bias is not None:
        qkv = qkv + bias
    query, key, value = torch.split_with_sizes(qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if query_norm is not None and key_norm is not None:
        query, key = rms_norm(query, query_norm, epsilon), rms_norm(key, key_norm, epsilon)
    keys[kv_slots.long()] = rotate(key, cos_sin, positions).to(keys.dtype)
    values[kv_slots.long()] = value.to(values.dtype)
    return rotate(query, cos_sin, positions)


def path_kv_slots(
    context_start: int,
    context_len: int,
    mask: torch.Tensor,
    tree_start: int,
    block_table: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """Return int64 [length]: the KV slots that one row attends to, in order of logical position.

    These are the logical KV slots from ``context_start`` to before ``context_len``, then
    ``tree_start + i`` for every set bit i of ``mask`` (uint64 [words]).
    """
    bits = [(word >> i) & 1 for word in mask.view(torch.int64).tolist() for i in range(_MASK_BITS)]
    logical = [*range(context_start, context_len), *(tree_start + i for i, bit in enumerate(bits) if bit)]
    return torch.tensor([int(block_table[s // block_size]) * block_size + s % block_size for s in logical])


def tree_attention(  # noqa: PLR0913 - the arguments of the kernel
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    row_seqs: torch.Tensor,
    context_lens: torch.Tensor,
    masks: torch.Tensor,
    tree_starts: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    context_starts: torch.Tensor,
) -> torch.Tensor:
    """Return the softmax attention of each row over its own path, scaled by head_dim ** -0.5.

    Args:
        query: [rows, num_heads, head_dim]; consecutive heads share a key head.
        keys, values: [num_kv_slots, num_kv_heads, head_dim].
        row_seqs, context_lens: int32 [rows].
        masks: uint64 [rows, words].
        tree_starts: int32 [seqs].
        block_tables: int32 [seqs, max_blocks].
        context_starts: int32 [seqs]; logical KV slots before it are on no path.

    Returns:
        [rows, num_heads, head_dim].
    """
    group = query.shape[1] // keys.shape[1]
    out = torch.empty_like(query)
    for row in range(len(query)):
        seq = int(row_seqs[row])
        context = int(context_starts[seq]), int(context_lens[row])
        kv_slots = path_kv_slots(*context, masks[row], int(tree_starts[seq]), block_tables[seq], block_size)
        key = keys[kv_slots].to(query.dtype).repeat_interleave(group, dim=1)
        value = values[kv_slots].to(query.dtype).repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,shd->hs", query[row], key) * query.shape[2] ** -0.5
        out[row] = torch.einsum("hs,shd->hd", scores.softmax(-1), value)
    return out


def kv_commit(cache: torch.Tensor, src_kv_slots: torch.Tensor, dst_kv_slots: torch.Tensor) -> None:
    """Copy KV slots ``src_kv_slots`` to ``dst_kv_slots`` in place, one by one, in every plane.

    Args:
        cache: [planes, num_kv_slots, kv_slot_size]; a plane is the keys or the values of one layer.
        src_kv_slots, dst_kv_slots: int32 [moves].
    """
    for src, dst in zip(src_kv_slots.tolist(), dst_kv_slots.tolist(), strict=True):
        cache[:, dst] = cache[:, src]
