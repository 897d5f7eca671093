"""Check fast mode's promise: a text changes only where two tokens are about equally likely.

    python -m benchmarks.gpu.near_ties --model DIR/target --drafter-head DIR/eagle3 --output FILE

It completes held-out prompts greedily, alone and in batches, with drafts and without. Where two
texts differ, one more request sends the prompt and the common text, and asks for the logprobs of
the next token. The gap is the difference between the logprobs of the two tokens. A gap that
rounding cannot explain fails (see BOUNDS). In strict mode any different text fails. The file is
written after each comparison.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.arms import EAGLE3
from benchmarks.command import finish, progress
from benchmarks.figures import median
from benchmarks.gpu.provenance import run_facts
from benchmarks.measure import UnexpectedAnswerError
from benchmarks.prompts import code_prompts, num_files
from benchmarks.stack import StackError, describe, running_stack
from foretoken.bench.client import Address

TIMEOUT_S = 600.0
NUM_LOGPROBS = 5
# Nats. Two ways to compute a position differ in the order of their sums, and therefore in how some
# hidden states are rounded. So a logit is exact to about one step of the element type at its size.
# The demo model's best logits are 11 to 23, where neighbours in bfloat16 (8 bits) are up to 0.125
# apart; the difference of two logits has twice that error. With the noise of float32 sums added
# before each rounding, the best token changed at 69 of 7,339 positions of held-out code, at gaps of
# 0.03 (median) and 0.13 (largest). In float32 only the order of sums matters.
BOUNDS = {"bfloat16": 0.25, "float16": 0.032, "float32": 1e-3}
# Pairs to compare: with or without drafts, in a batch or alone.
COMPARISONS = (
    ("drafted, alone", "plain, alone"),
    ("plain, in batches", "plain, alone"),
    ("drafted, in batches", "plain, in batches"),
)

# Completes prompts at once, with or without drafts; returns the tokens of each.
Complete = Callable[[Sequence[Sequence[int]], bool], list[list[int]]]
# Returns the best next tokens of a prompt, with their logprobs.
Best = Callable[[Sequence[int]], dict[int, float]]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference of two texts, at token ``at``.

    ``gap`` is in nats, or None if one of the two tokens is not among the best.
    """

    prompt: int
    at: int
    tokens: tuple[int, int]
    gap: float | None


@dataclass(frozen=True, slots=True)
class TextComparison:
    """All prompts, completed in two ways.

    ``num_tokens`` counts each text up to its first difference, or to its end.
    """

    texts: str
    against: str
    num_texts: int
    num_tokens: int
    divergences: tuple[Divergence, ...]

    @property
    def per_1000_tokens(self) -> float:
        return 1e3 * len(self.divergences) / self.num_tokens

    @property
    def gaps(self) -> list[float]:
        return [each.gap for each in self.divergences if each.gap is not None]

    def failures(self, bound: float | None) -> list[str]:
        """Return the divergences of more than ``bound`` nats, or all for None."""
        return [
            f"{self.texts} against {self.against}: prompt {each.prompt}, token {each.at}: {each.tokens[0]} and "
            f"{each.tokens[1]}, {_shown(each.gap)} apart"
            for each in self.divergences
            if bound is None or each.gap is None or each.gap > bound
        ]


def first_difference(text: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first index at which two texts of one length differ, or None."""
    return next((at for at, (one, two) in enumerate(zip(text, other, strict=True)) if one != two), None)


def compare(
    prompts: Sequence[Sequence[int]], texts: Iterable[tuple[str, list[list[int]]]], best: Best
) -> Iterator[TextComparison]:
    """Yield each of COMPARISONS as soon as both of its texts exist.

    ``texts`` yields each text with its name.
    """
    known: dict[str, list[list[int]]] = {}
    for latest, found in texts:
        known[latest] = found
        for name, against in COMPARISONS:
            if latest in (name, against) and name in known and against in known:
                yield _comparison(prompts, known, name, against, best)


def _comparison(
    prompts: Sequence[Sequence[int]], texts: dict[str, list[list[int]]], name: str, against: str, best: Best
) -> TextComparison:
    divergences, num_tokens = [], 0
    for index, (text, other) in enumerate(zip(texts[name], texts[against], strict=True)):
        at = first_difference(text, other)
        num_tokens += len(text) if at is None else at + 1
        if at is not None:
            gap = gap_of(best([*prompts[index], *text[:at]]), text[at], other[at])
            divergences.append(Divergence(index, at, (text[at], other[at]), gap))
    return TextComparison(name, against, len(texts[name]), num_tokens, tuple(divergences))


def gap_of(best: dict[int, float], token: int, other: int) -> float | None:
    """Return the nats between two tokens, or None if one is not among the best."""
    return abs(best[token] - best[other]) if token in best and other in best else None


def complete_all(
    prompts: Sequence[Sequence[int]], batch: int, complete: Complete
) -> Iterator[tuple[str, list[list[int]]]]:
    """Complete every prompt in four ways; yield each with its name in COMPARISONS."""
    for where, size in (("alone", 1), ("in batches", batch)):
        for what, drafted in (("plain", False), ("drafted", True)):
            name = f"{what}, {where}"
            texts: list[list[int]] = []
            for first in range(0, len(prompts), size):
                texts += complete(prompts[first : first + size], drafted)
            progress(f"{name}: {len(prompts)} texts")
            yield name, texts


class GenerateClient:
    """Calls POST /generate of one server, and counts drafts and accepted tokens."""

    def __init__(self, address: Address, num_tokens: int, drafter: str) -> None:
        self._url = f"http://{address.host}:{address.port}/generate"
        self._num_tokens, self._drafter = num_tokens, drafter
        self.num_drafted = self.num_accepted = 0

    def complete(self, prompts: Sequence[Sequence[int]], drafted: bool) -> list[list[int]]:
        """Complete one prompt. Raises UnexpectedAnswerError."""
        speculative = {"enabled": True, "drafter": self._drafter} if drafted else {"enabled": False}
        answers = self._post(prompts, self._num_tokens, speculative=speculative)
        for answer in answers:
            if len(answer["output_ids"]) != self._num_tokens:
                raise UnexpectedAnswerError(f"{len(answer['output_ids'])} tokens, not {self._num_tokens}")
            self.num_drafted += answer["meta_info"]["spec_draft_token_num"]
            self.num_accepted += answer["meta_info"]["spec_accept_token_num"]
        return [answer["output_ids"] for answer in answers]

    def best(self, prompt: Sequence[int]) -> dict[int, float]:
        """Return the NUM_LOGPROBS best next tokens of a prompt. Raises UnexpectedAnswerError."""
        wanted = {"return_logprob": True, "top_logprobs_num": NUM_LOGPROBS, "speculative": {"enabled": False}}
        (answer,) = self._post([prompt], 1, **wanted)
        (entries,) = answer["meta_info"]["output_top_logprobs"]
        return {token: logprob for logprob, token, _ in entries}

    def _post(self, prompts: Sequence[Sequence[int]], num_tokens: int, **fields: Any) -> list[dict[str, Any]]:
        body = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True},
            # Each request is its own tenant: no prefix is cached, and no history exists.
            "cache_salt": uuid.uuid4().hex,
            **fields,
        }
        request = urllib.request.Request(self._url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                answers: list[dict[str, Any]] = json.load(response)
        except urllib.error.HTTPError as error:
            raise UnexpectedAnswerError(f"status {error.code}: {error.read()[:500]!r}") from error
        except OSError as error:
            raise UnexpectedAnswerError(f"{self._url}: {error}") from error
        return answers


def measure(options: argparse.Namespace) -> Iterator[tuple[dict[str, Any], list[TextComparison]]]:
    """Yield the result again after each comparison, with all comparisons so far.

    Raises:
        StackError, UnexpectedAnswerError: the stack or an answer was wrong.
    """
    model = options.model.resolve()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    found = code_prompts(tokenizer, options.prompts)
    prompts = [prompt.token_ids for prompt in found]
    flags = ["--numerics", options.numerics, "--dtype", options.dtype, "--disable-radix-cache"]
    if options.drafter_head is not None:
        steps, topk, tokens = options.tree
        flags += ["--drafter", EAGLE3.format(head=options.drafter_head.resolve())]
        flags += ["--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(topk)]
        flags += ["--speculative-num-draft-tokens", str(tokens)]
    flags += shlex.split(options.serve_flags)
    with running_stack(model, options.threads, flags, ready_timeout_s=TIMEOUT_S) as (address, _):
        (verifier,) = describe(address)["verifiers"]
        client = GenerateClient(address, options.tokens, options.drafter)
        facts = {
            "mode": verifier["mode"],
            "dtype": verifier["dtype"],
            "bound": BOUNDS[verifier["dtype"]] if options.bound is None else options.bound,
            "prompts": f"{len(prompts)} from {num_files(found)} held-out files, {options.tokens} tokens each",
            "batch": options.batch,
        }
        comparisons: list[TextComparison] = []
        for comparison in compare(prompts, complete_all(prompts, options.batch, client.complete), client.best):
            comparisons.append(comparison)
            yield facts | {"num_drafted": client.num_drafted, "num_accepted": client.num_accepted}, comparisons
    if not client.num_accepted:
        raise UnexpectedAnswerError(f"of {client.num_drafted} drafted tokens none was accepted: nothing was compared")


def to_markdown(comparisons: Sequence[TextComparison]) -> str:
    """Return a table with a line for each comparison."""
    lines = ["| texts | against | that differ | of 1000 tokens | median gap, nats | largest gap |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: |")
    for each in comparisons:
        gaps = f"{median(each.gaps):.4f} | {max(each.gaps):.4f}" if each.gaps else "|"
        lines.append(
            f"| {each.texts} | {each.against} | {len(each.divergences)} of {each.num_texts} | "
            f"{each.per_1000_tokens:.2f} | {gaps} |"
        )
    return "\n".join(lines) + "\n"


def _shown(gap: float | None) -> str:
    return f"not both among the {NUM_LOGPROBS} best, and so far" if gap is None else f"{gap:.4f} nats"


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="benchmarks.gpu.near_ties", description=__doc__.splitlines()[0])
    found.add_argument("--model", type=Path, required=True, help="the target's folder: the demo's, or as widened")
    found.add_argument("--drafter-head", type=Path, help="its EAGLE-3 head's folder; without: n-grams")
    found.add_argument("--output", type=Path, required=True, help="a JSON file to write")
    found.add_argument("--drafter", default="auto", help="as requests name it")
    found.add_argument("--tree", type=int, nargs=3, default=(5, 8, 32), metavar=("STEPS", "TOPK", "TOKENS"))
    found.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="as foretoken serve's"
    )
    found.add_argument("--numerics", choices=("auto", "strict", "fast"), default="auto", help="as foretoken serve's")
    found.add_argument("--bound", type=float, help="nats; by default what the element type is good for")
    found.add_argument("--prompts", type=int, default=48)
    found.add_argument("--tokens", type=int, default=192, help="of each output")
    found.add_argument("--batch", type=int, default=16, help="prompts at once")
    found.add_argument("--threads", type=int, default=0, help="as foretoken serve's; counts on a CPU")
    found.add_argument("--serve-flags", default="", help="more flags of foretoken serve, as one word")
    found.add_argument("--commit", default="", help="the commit, in a copy without its history")
    return found


def main() -> None:
    options = parser().parse_args()
    result = run_facts("near_ties", options.commit)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    try:
        for facts, comparisons in measure(options):
            rows = [asdict(each) | {"per_1000_tokens": each.per_1000_tokens} for each in comparisons]
            options.output.write_text(json.dumps(result | facts | {"comparisons": rows}, indent=1) + "\n")
    except (StackError, UnexpectedAnswerError) as error:
        sys.exit(f"failed: {error}")
    print(f"{facts['mode']} mode, {facts['dtype']}: {facts['prompts']}\n\n{to_markdown(comparisons)}")
    is_strict, bound = facts["mode"] == "strict", facts["bound"]
    limit = "no text may differ in strict mode" if is_strict else f"at most {bound:g}"
    finish([f"{line}; {limit}" for each in comparisons for line in each.failures(None if is_strict else bound)])


if __name__ == "__main__":
    main()
