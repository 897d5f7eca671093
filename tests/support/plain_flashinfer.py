"""The part of FlashInfer 0.6.12 that foretoken uses, in plain PyTorch on any device.

It reads the same arguments the same way: ``plan`` counts a packed mask's starts in bits and ``run``
reads them as bytes. A KV slot that is read and holds NaN turns every row of its sequence to NaN,
seen or not, as a matrix product would.
"""

from __future__ import annotations

import math

import torch


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        assert kv_layout == "NHD" and float_workspace_buffer.dtype == torch.uint8
        self.backend = backend

    def plan(  # noqa: PLR0913 - FlashInfer's own signature
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        q_data_type: torch.dtype = torch.float16,
        seq_lens: torch.Tensor,
        max_token_per_sequence: int,
    ) -> None:
        for array in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, seq_lens):
            # Its C++ reads the first two and the lengths on the host, as 32-bit integers.
            assert array.dtype == torch.int32 and array.device.type == "cpu" and array.is_contiguous()
        lengths = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
        assert (lengths == seq_lens).all() and (paged_kv_last_page_len > 0).all()
        assert (paged_kv_last_page_len <= page_size).all()
        assert max_token_per_sequence == qo_indptr.diff().max()
        assert packed_custom_mask is None or (self.backend == "fa2" and packed_custom_mask.dtype == torch.uint8)
        self._heads = num_qo_heads, num_kv_heads, head_dim_qk
        self._dtype, self._causal, self._page_size = q_data_type, causal, page_size
        self._rows, self._starts, self._pages = qo_indptr.tolist(), paged_kv_indptr.tolist(), paged_kv_indices.long()
        self._lengths = lengths.tolist()
        self._mask = packed_custom_mask
        self._mask_indptr_buf = torch.zeros_like(qo_indptr)
        self._mask_indptr_buf[1:] = (qo_indptr.diff() * lengths).cumsum(0)

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor
    ) -> torch.Tensor:
        num_heads, num_kv_heads, head_dim = self._heads
        assert q.shape == out.shape == (self._rows[-1], num_heads, head_dim)
        assert out.is_contiguous() and q.stride(-1) == 1 and q.dtype == out.dtype == self._dtype
        for cache in paged_kv_cache:
            assert cache.shape[1:] == (self._page_size, num_kv_heads, head_dim) and cache.dtype == self._dtype
        for seq, length in enumerate(self._lengths):
            rows = slice(self._rows[seq], self._rows[seq + 1])
            pages = self._pages[self._starts[seq] : self._starts[seq + 1]].to(q.device)
            key, value = (cache[pages].flatten(0, 1)[:length].float() for cache in paged_kv_cache)
            visible = self._visible(seq, rows.stop - rows.start, length).to(q.device)
            group = num_heads // num_kv_heads
            scores = torch.einsum("qhd,khd->hqk", q[rows].float(), key.repeat_interleave(group, 1))
            weights = (scores / math.sqrt(head_dim)).masked_fill(~visible, -math.inf).softmax(-1)
            out[rows] = torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(group, 1)).to(out.dtype)
        return out

    def _visible(self, seq: int, rows: int, length: int) -> torch.Tensor:
        if self._mask is None:
            assert self._causal
            return torch.arange(length) <= torch.arange(length - rows, length)[:, None]
        start = int(self._mask_indptr_buf[seq])
        bit = torch.arange(rows * length)
        return ((self._mask[start + bit // 8] >> (bit % 8)) & 1).bool().view(rows, length)
