"""Measure a demo target: held-out bits per byte beside xz, and samples of its completions.

    python -m models.demo.evaluate --target models/demo/target --output FOLDER

Writes ``evaluation.json`` and ``samples.md`` into ``--output``. Uses ``transformers`` as it is
installed.
"""

from __future__ import annotations

import argparse
import ast
import codeop
import json
import lzma
import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from models.demo.held_out import Prompt, held_out_files, held_out_prompts
from models.demo.source_rule import read_source
from models.demo.tokenizer import CONTEXT_LENGTH, load_for_corpus

STRIDE = 1_024
NUM_SAMPLES, NUM_SHOWN = 100, 10
PROMPT_TOKENS, COMPLETION_TOKENS = (200, 400), 256
TEMPERATURE, TOP_P = 0.8, 0.95


@dataclass(frozen=True, slots=True)
class Compression:
    """The compression of some files: bytes, and bits per byte of the model and ``xz -9e``."""

    files: int
    bytes: int
    tokens: int
    model_bits_per_byte: float
    xz_each_bits_per_byte: float
    xz_together_bits_per_byte: float


def compression(model: PreTrainedModel, tokenizer: Tokenizer, files: Sequence[Path]) -> Compression:
    """Return bits per byte over whole files. The first token follows only the separator."""
    texts = [read_source(path) for path in files]
    data = [text.encode() for text in texts]
    num_bytes = sum(map(len, data))
    ids = [tokenizer.encode(text).ids for text in texts]
    bits = sum(document_nats(model, each) for each in ids) / math.log(2)
    each_bits = 8 * sum(len(_xz(part)) for part in data)
    together_bits = 8 * len(_xz(b"".join(data)))
    tokens = sum(map(len, ids))
    return Compression(
        len(files), num_bytes, tokens, bits / num_bytes, each_bits / num_bytes, together_bits / num_bytes
    )


@torch.no_grad()
def document_nats(model: PreTrainedModel, ids: Sequence[int]) -> float:
    """Return the document's loss in nats, over context-length windows that move by ``STRIDE``."""
    tokens = torch.tensor([0, *ids], device=model.device)
    total, done = 0.0, 1
    while done < len(tokens):
        end = min(len(tokens), max(done + STRIDE, CONTEXT_LENGTH))
        start = max(0, end - CONTEXT_LENGTH)
        logits = model(tokens[None, start : end - 1]).logits[0, done - 1 - start :].float()
        total += float(torch.nn.functional.cross_entropy(logits, tokens[done:end], reduction="sum"))
        done = end
    return total


@torch.no_grad()
def complete(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], num_tokens: int, greedy: bool
) -> list[list[int]]:
    """Return one batch's completions, greedy or by nucleus sampling, up to the first stop id."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(each)) + list(each) for each in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in prompts], device=model.device)
    sampling = (
        {"do_sample": False} if greedy else {"do_sample": True, "temperature": TEMPERATURE, "top_p": TOP_P, "top_k": 0}
    )
    output: Tensor = model.generate(ids, attention_mask=mask, max_new_tokens=num_tokens, **sampling)  # type: ignore[operator]
    stops = set(model.generation_config.eos_token_id or [])
    completions = []
    for row in output[:, width:].tolist():
        stop = next((index for index, token in enumerate(row) if token in stops), len(row))
        completions.append(row[:stop])
    return completions


def verdict(prompt: str, completion: str) -> str:
    """Judge a completion, cut after its last full line.

    It is ``parses``, ``unfinished`` (more lines could make it parse) or ``wrong``. A completion
    without a full line is ``wrong``, so that the prompt alone does not count.
    """
    if "\n" not in completion:
        return "wrong"
    cut = prompt + completion[: completion.rfind("\n") + 1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(cut)
        except (SyntaxError, ValueError):
            pass
        else:
            return "parses"
        return "unfinished" if _is_unfinished(cut) else "wrong"


def _is_unfinished(text: str) -> bool:
    try:
        return codeop.compile_command(text.rstrip("\n"), symbol="exec") is None
    except (SyntaxError, ValueError, OverflowError):
        return False


def _xz(data: bytes) -> bytes:
    return lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)


def _sample_section(number: int, prompt: Prompt, completion: str) -> str:
    tail = "\n".join(prompt.text.rstrip("\n").split("\n")[-8:])
    name = "/".join(prompt.file.parts[-2:])
    return (
        f"### Sample {number}: after {len(prompt.token_ids)} tokens of `{name}`\n\n"
        f"The prompt's last lines:\n\n````python\n{tail}\n````\n\nThe completion:\n\n````python\n{completion}\n````\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-size", type=int, default=50)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    tokenizer = load_for_corpus(options.target / "tokenizer.json")
    model = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32).to(options.device).eval()

    standard = held_out_files()
    with_dependencies = held_out_files(include_dependencies=True)
    dependencies = [path for path in with_dependencies if path not in set(standard)]
    sets = {"standard library": standard, "own dependencies": dependencies}
    results = {name: asdict(compression(model, tokenizer, files)) for name, files in sets.items() if files}
    print(json.dumps(results, indent=2), flush=True)

    torch.manual_seed(0)
    prompts = held_out_prompts(tokenizer, NUM_SAMPLES, *PROMPT_TOKENS)
    texts: dict[str, list[str]] = {}
    for name in ("sampled", "greedy"):
        texts[name] = []
        for start in range(0, NUM_SAMPLES, options.batch_size):
            batch = [prompt.token_ids for prompt in prompts[start : start + options.batch_size]]
            rows = complete(model, batch, COMPLETION_TOKENS, greedy=name == "greedy")
            texts[name].extend(tokenizer.decode(row, skip_special_tokens=False) for row in rows)
    verdicts = {
        name: [verdict(prompt.text, text) for prompt, text in zip(prompts, completions, strict=True)]
        for name, completions in texts.items()
    }
    counts = {
        name: {kind: found.count(kind) for kind in ("parses", "unfinished", "wrong")}
        for name, found in verdicts.items()
    }
    print(json.dumps(counts), flush=True)
    evaluation = {
        "python": sys.version.split()[0],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "compression": results,
        "completions": {"temperature": TEMPERATURE, "top_p": TOP_P, "tokens": COMPLETION_TOKENS, **counts},
    }
    (options.output / "evaluation.json").write_text(json.dumps(evaluation, indent=2) + "\n")
    shown = zip(prompts[:NUM_SHOWN], texts["sampled"][:NUM_SHOWN], strict=True)
    sections = [_sample_section(number, prompt, text) for number, (prompt, text) in enumerate(shown, 1)]
    (options.output / "samples.md").write_text("\n".join(sections))


if __name__ == "__main__":
    main()
