"""``foretoken train self-text``: let a target write text to train its drafters on.

A drafter predicts the target's own text, which differs from the text that the target was trained
on. EAGLE (arXiv 2401.15077) and its successors train on it for that reason.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken import hub
from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


def write_self_text(options: argparse.Namespace) -> None:
    """Write ``options.tokens`` tokens to ``options.output`` (.npy, int32).

    Each row is a prompt and its continuation.

    The share ``options.greedy_share`` of the rows is greedy, the rest is sampled at temperature 1.

    Raises ConfigError if the prompts are longer than the rows or the data.
    """
    print(f"loading {options.target}", flush=True)
    # Importing these takes seconds, so the message above comes first.
    import numpy as np
    import torch

    from foretoken.train.data import load_tokens
    from foretoken.train.device import pick_device
    from foretoken.train.target import FrozenTarget

    device = pick_device(options.device)
    target = FrozenTarget(hub.resolve(str(options.target)), device)
    tokens = load_tokens(options.data, options.glob, target.path, target.separator, target.config.vocab_size)
    prompt, length = options.prompt_length, options.length
    if not 0 < prompt < length or len(tokens) <= prompt:
        raise ConfigError("--prompt-length must be less than --length and than the tokens of --data")
    generator = torch.Generator().manual_seed(options.seed)
    torch.manual_seed(options.seed)
    rows: list[Tensor] = []
    num_rows = -(-options.tokens // length)
    at_once = min(options.batch_size, num_rows) * length
    print(f"writing {num_rows * length:,} tokens, {at_once:,} at a time, on {device}", flush=True)
    while (done := sum(map(len, rows))) < num_rows:
        starts = torch.randint(len(tokens) - prompt, (min(options.batch_size, num_rows - done),), generator=generator)
        prompts = tokens[starts[:, None] + torch.arange(prompt)].long().to(device)
        greedy = round(len(prompts) * options.greedy_share)
        for part, is_sampled in ((prompts[:greedy], False), (prompts[greedy:], True)):
            if len(part):
                rows.append(target.written_text(part, length - prompt, is_sampled=is_sampled).int().cpu())
        print(f"{sum(map(len, rows)) * length:,} of {num_rows * length:,} tokens", flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    np.save(options.output, torch.cat(rows).flatten().numpy())


def make_parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(program, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add: Any = parser.add_argument
    add("target", type=Path, metavar="TARGET", help="folder of the target's checkpoint, or its id on the hub")
    add("--data", type=Path, required=True, help="source of the prompts: a folder of text, or a token file (.npy)")
    add("--output", type=Path, required=True, help="token file to write (.npy)")
    add("--tokens", type=int, default=4_000_000, help="tokens to write, including prompts (default: %(default)s)")
    add("--glob", action="append", default=[], help="names of the text files in a folder (default: *.py *.txt)")
    add("--length", type=int, default=1024, help="tokens per row (default: %(default)s)")
    add("--prompt-length", type=int, default=256, help="prompt tokens per row (default: %(default)s)")
    add("--greedy-share", type=float, default=0.6, help="share of greedy rows; others sampled (default: %(default)s)")
    add("--batch-size", type=int, default=512, help="rows at once (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of prompts and samples (default: %(default)s)")
    add("--device", default="auto", help="cpu, cuda or cuda:N (default: the GPU if there is one)")
    return parser


def run(arguments: Sequence[str], program: str) -> None:
    """Parse and write. Raises ConfigError or CheckpointError for errors that the user can fix."""
    options = make_parser(program).parse_args(arguments)
    options.glob = tuple(options.glob) or ("*.py", "*.txt")
    if not (options.tokens > 0 and options.batch_size > 0 and 0 <= options.greedy_share <= 1):
        raise ConfigError("--tokens and --batch-size must be more than 0, --greedy-share between 0 and 1")
    write_self_text(options)
