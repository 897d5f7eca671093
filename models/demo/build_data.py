"""Build the training data: split the corpus, train the tokenizer, write both sides as token arrays.

    python -m models.demo.build_data --output DATA [--extra-root FOLDER ...] [--tokenizer FOLDER]

It writes ``tokenizer/``, ``train.npy`` and ``held_out.npy`` (uint16 [num_tokens], documents
separated by the end-of-text id), ``held_out_bytes``, and all statistics in ``corpus.json``. With
``--tokenizer`` it uses that tokenizer and trains none, as a drafter for an existing target needs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from models.demo.chat_samples import chat_samples
from models.demo.corpus import SourceFile, build_corpus, package_table
from models.demo.source_rule import read_source
from models.demo.tokenizer import (
    ASSISTANT,
    END_OF_TEXT,
    END_OF_TURN,
    USER,
    VOCAB_SIZE,
    load_for_corpus,
    save_tokenizer,
    train_tokenizer,
)

TOKENIZER_SAMPLE_BYTES = 60_000_000
CHAT_SHARE = 0.25  # of the eligible functions
_FILES_PER_TASK = 32


def build_data(
    output: Path, extra_roots: Sequence[Path], vocab_size: int, num_workers: int, tokenizer: Path | None = None
) -> None:
    """Run every stage and print one line with its wall time.

    ``tokenizer`` is the folder of an existing tokenizer to use.
    """
    output.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    corpus = build_corpus(extra_roots, num_workers)
    if not corpus.train:
        raise SystemExit("no training file was found")
    _report(started, f"split: {len(corpus.train)} train, {len(corpus.held_out)} held-out, dropped {corpus.dropped}")

    order = list(corpus.train)
    random.Random(0).shuffle(order)
    if tokenizer is None:
        save_tokenizer(train_tokenizer(_sample_texts(order), vocab_size), output / "tokenizer")
        _report(started, "tokenizer trained")
    else:
        save_tokenizer(Tokenizer.from_file(str(tokenizer / "tokenizer.json")), output / "tokenizer")

    tokenizer_file = output / "tokenizer" / "tokenizer.json"
    train = tokenize(order, tokenizer_file, num_workers, with_chat=True)
    held_out = tokenize(corpus.held_out, tokenizer_file, num_workers, with_chat=False)
    np.save(output / "train.npy", train)
    np.save(output / "held_out.npy", held_out)
    sizes = {side: _text_bytes(files) for side, files in (("train", corpus.train), ("held_out", corpus.held_out))}
    statistics = {
        "train_files": len(corpus.train),
        "train_bytes": sizes["train"],
        "train_tokens": len(train),
        "held_out_files": len(corpus.held_out),
        "held_out_bytes": sizes["held_out"],
        "held_out_tokens": len(held_out),
        "dropped_files": dict(corpus.dropped.most_common()),
        "packages": package_table(corpus),
    }
    (output / "corpus.json").write_text(json.dumps(statistics, indent=1) + "\n")
    _report(started, f"tokenised: {len(train)} train and {len(held_out)} held-out tokens, bytes {sizes}")


def tokenize(
    files: Sequence[SourceFile], tokenizer_file: Path, num_workers: int, with_chat: bool
) -> NDArray[np.uint16]:
    """Return all documents in order, each after the end-of-text id; with chat samples if asked."""
    tasks = [files[start : start + _FILES_PER_TASK] for start in range(0, len(files), _FILES_PER_TASK)]
    work = partial(_tokenize_task, tokenizer_file=tokenizer_file, with_chat=with_chat)
    if num_workers == 1:
        parts = list(map(work, tasks))
    else:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        with multiprocessing.get_context("spawn").Pool(num_workers) as pool:
            parts = pool.map(work, tasks, chunksize=1)
    return np.concatenate(parts)


def _tokenize_task(files: Sequence[SourceFile], tokenizer_file: Path, with_chat: bool) -> NDArray[np.uint16]:
    tokenizer = load_for_corpus(tokenizer_file)
    vocabulary = tokenizer.get_vocab()
    separator, user, assistant, end = (vocabulary[name] for name in (END_OF_TEXT, USER, ASSISTANT, END_OF_TURN))
    ids: list[int] = []
    for file in files:
        text = read_source(file.path)
        ids.append(separator)
        ids.extend(tokenizer.encode(text).ids)
        for sample in chat_samples(text) if with_chat else ():
            if zlib.crc32(sample.reply.encode("utf-8", "surrogatepass")) / 2**32 < CHAT_SHARE:
                ids.extend((separator, user, *tokenizer.encode(sample.request).ids, end))
                ids.extend((assistant, *tokenizer.encode(sample.reply).ids, end))
    return np.array(ids, np.uint16)


def _sample_texts(files: Iterable[SourceFile]) -> Iterator[str]:
    num_bytes = 0
    for file in files:
        text = read_source(file.path)
        yield text
        num_bytes += len(text)
        if num_bytes >= TOKENIZER_SAMPLE_BYTES:
            return


def _text_bytes(files: Iterable[SourceFile]) -> int:
    return sum(len(read_source(file.path).encode()) for file in files)


def _report(started: float, line: str) -> None:
    print(f"[{time.monotonic() - started:6.1f} s] {line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--extra-root", type=Path, action="append", default=[], help="laid out like site-packages")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json; none is trained")
    parser.add_argument("--num-workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    build_data(options.output, options.extra_root, options.vocab_size, options.num_workers, options.tokenizer)


if __name__ == "__main__":
    main()
