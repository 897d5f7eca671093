"""Compare a widened model with the small one: logits, greedy text, drafts, and the reserved id.

    python -m benchmarks.gpu.widen_check DIR [--prompts 8] [--tokens 64]

benchmarks.gpu.widen wrote DIR. All arithmetic is float32. transformers computes the targets, on a
GPU if there is one. The exit status is 1 if a text differs or an error is above its limit.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.command import finish
from benchmarks.gpu.checkpoint import DEMO, best_device
from benchmarks.gpu.widen import RESERVED_ID
from foretoken.models.batch import ForwardBatch
from foretoken.models.config import load_config
from foretoken.models.draft_config import head_captured_layers, head_config
from foretoken.models.draft_head import HostDraftHead, load_head
from foretoken.models.draft_weights import HeadSource
from foretoken.models.target_weights import load_target_weights
from models.demo.held_out import held_out_prompts

# The error of float32 sums in another order, over 32 layers.
MAX_RELATIVE_ERROR = 1e-3
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class WidenedComparison:
    """The differences over all prompts and the small model's greedy tokens after them.

    Attributes:
        num_positions: compared positions.
        logit_error: the largest relative distance of the logits at a position (2-norms).
        num_other_tokens: positions where the wide model's best id is not the small model's.
        smallest_gap: the least difference between the small model's two best logits.
        draft_error: the largest relative distance of the head's logits.
        num_other_drafts: positions where the two heads' best ids differ.
        reserved_margin: the largest value of RESERVED_ID's logit minus the best logit.
    """

    num_positions: int
    logit_error: float
    num_other_tokens: int
    smallest_gap: float
    draft_error: float
    num_other_drafts: int
    reserved_margin: float

    def failures(self) -> list[str]:
        """Return the reasons why the wide model differs from the small one."""
        found = []
        if not max(self.logit_error, self.draft_error) < MAX_RELATIVE_ERROR:
            found.append(f"logits differ by {self.logit_error:.2g}, drafts' by {self.draft_error:.2g}")
        if self.num_other_tokens:
            found.append(f"{self.num_other_tokens} of {self.num_positions} greedy tokens differ")
        if self.reserved_margin >= 0:
            found.append(f"the reserved id {RESERVED_ID} is best somewhere")
        return found


def compare(
    small: Path, small_head: Path, wide: Path, prompts: Sequence[Sequence[int]], num_tokens: int
) -> WidenedComparison:
    """Compare the small target and its head with ``wide``/target and ``wide``/eagle3.

    The small model adds ``num_tokens`` greedy tokens to each prompt; then both models compute the
    whole text. If all best ids agree, the wide model's own greedy text is the same.
    """
    captured = [head_captured_layers(head_config(head), load_config(target).num_layers)
                for head, target in ((small_head, small), (wide / "eagle3", wide / "target"))]  # fmt: skip
    model = _load(small)
    texts = [_continued(model, prompt, num_tokens) for prompt in prompts]
    expected = [_outputs(model, text, captured[0]) for text in texts]
    del model
    model = _load(wide / "target")
    found = [_outputs(model, text, captured[1]) for text in texts]
    del model
    heads = [_load_head(small_head, small), _load_head(wide / "eagle3", wide / "target")]
    vocab_size = load_config(small).vocab_size
    logit_errors, draft_errors, others, other_drafts, gaps, margins = [], [], 0, 0, [], []
    for text, prompt, (logits, states), (wide_logits, wide_states) in zip(texts, prompts, expected, found, strict=True):
        logit_errors.append(_relative_error(wide_logits[:, :vocab_size], logits))
        # Only the text after the prompt is the model's own.
        others += _num_different(wide_logits[len(prompt) - 1 :], logits[len(prompt) - 1 :])
        best = logits.topk(2).values
        gaps.append(float((best[:, 0] - best[:, 1])[len(prompt) - 1 :].min()))
        margins.append(float((logits[:, RESERVED_ID] - best[:, 0]).max()))
        drafts = _draft_logits(heads[0], text, states)
        wide_drafts = _draft_logits(heads[1], text, wide_states)
        draft_errors.append(_relative_error(wide_drafts[:, :vocab_size], drafts))
        other_drafts += _num_different(wide_drafts, drafts)
    return WidenedComparison(
        num_positions=sum(map(len, texts)),
        logit_error=max(logit_errors),
        num_other_tokens=others,
        smallest_gap=min(gaps),
        draft_error=max(draft_errors),
        num_other_drafts=other_drafts,
        reserved_margin=max(margins),
    )


def reserved_margins(small: Path, prompts: Sequence[Sequence[int]], ids: Sequence[int]) -> dict[int, float]:
    """Return for each id the largest value of its logit minus the best one, over all prompts."""
    model = _load(small)
    rows = [_outputs(model, prompt, ())[0] for prompt in prompts]
    return {i: max(float((logits[:, i] - logits.max(dim=1).values).max()) for logits in rows) for i in ids}


def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(best_device()).eval()


@torch.inference_mode()
def _continued(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return the prompt and the model's greedy text, which goes on after an end-of-text token."""
    ids = torch.tensor([list(prompt)], device=model.device)
    model.generation_config.eos_token_id = None
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens, pad_token_id=0
    )
    return [int(token) for token in out[0]]


@torch.inference_mode()
def _outputs(model: Any, text: Sequence[int], captured: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits [tokens, vocab] and the hidden states that enter ``captured``, side by side."""
    out = model(torch.tensor([list(text)], device=model.device), output_hidden_states=bool(captured))
    states = [out.hidden_states[layer][0] for layer in captured] or [torch.empty(len(text), 0)]
    return out.logits[0].cpu(), torch.cat(states, dim=1).cpu()


def _load_head(folder: Path, target: Path) -> HostDraftHead:
    config = load_config(target)
    source = HeadSource(folder, config, load_target_weights(target, config), torch.float32)
    length = config.max_position_embeddings
    return HostDraftHead(load_head(source, length // BLOCK_SIZE, BLOCK_SIZE), length)


def _draft_logits(head: HostDraftHead, text: Sequence[int], states: torch.Tensor) -> torch.Tensor:
    """Return the head's logits [tokens - 1, draft vocab] after each token except the first.

    Each comes from the token and the hidden state before it.
    """
    rows = len(text) - 1
    kv_slots = np.arange(1, rows + 1, dtype=np.int32)
    batch = ForwardBatch(
        token_ids=np.array(text[1:], np.int32),
        positions=kv_slots,
        kv_slots=kv_slots,
        row_seqs=np.zeros(rows, np.int32),
        context_lens=kv_slots + 1,
        masks=np.zeros((rows, 1), np.uint64),
        tree_starts=np.zeros(1, np.int32),
        block_tables=np.arange(rows // BLOCK_SIZE + 1, dtype=np.int32)[None],
        logit_rows=np.arange(rows, dtype=np.int32),
        context_starts=np.ones(1, np.int32),
    )
    given = np.ascontiguousarray(states[:-1].numpy(), np.float32)
    return head.forward(batch, given, from_target=True).logits.clone()


def _relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest relative error of a row; NaN if one is NaN."""
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())


def _num_different(found: torch.Tensor, expected: torch.Tensor) -> int:
    return int((found.argmax(dim=1) != expected.argmax(dim=1)).sum())


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.widen_check", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="what benchmarks.gpu.widen wrote")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    prompts = [prompt.token_ids for prompt in held_out_prompts(tokenizer, options.prompts)]
    found = compare(DEMO / "target", DEMO / "eagle3", options.folder, prompts, options.tokens)
    print(
        f"{found.num_positions} positions: logits differ by {found.logit_error:.2g}, "
        f"{found.num_other_tokens} greedy tokens differ (least gap {found.smallest_gap:.2g}); "
        f"draft logits by {found.draft_error:.2g}, {found.num_other_drafts} best drafts differ; "
        f"the reserved id stays {-found.reserved_margin:.3g} below the best"
    )
    finish(found.failures())


if __name__ == "__main__":
    main()
