"""The tokens to train on and the order of their windows.

The order only depends on seed and step, so a resumed run gets the same batches as an uninterrupted
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from foretoken.errors import ConfigError

_FILES_PER_BATCH = 256
# Without --held-out, one file (or token) of so many is held out.
_HELD_OUT_SHARE = 20


@dataclass(frozen=True, slots=True)
class TokenSplit:
    """Two token streams, int32 [num_tokens] each; every document begins with the separator id."""

    train: Tensor
    held_out: Tensor


def load_split(
    data: Path, held_out: Path | None, globs: Sequence[str], target: Path, separator: int, vocab_size: int
) -> TokenSplit:
    """Return the tokens of ``data`` and ``held_out``.

    Without ``held_out``, every 20th file or the last 20th of a token file is held out. Raises
    ConfigError for a path that is neither, an empty folder, or ids that the target lacks.
    """
    if held_out is not None:
        sides = [load_tokens(path, globs, target, separator, vocab_size) for path in (data, held_out)]
        return TokenSplit(*sides)
    if data.is_dir():
        files = text_files(data, globs)
        if len(files) < 2:
            raise ConfigError(f"{data} has {len(files)} file with text: give --held-out, or more files")
        every = min(_HELD_OUT_SHARE, len(files))
        measured = files[every // 2 :: every]
        rest = sorted(set(files) - set(measured))
        return TokenSplit(encode_files(rest, target, separator), encode_files(measured, target, separator))
    tokens = load_tokens(data, globs, target, separator, vocab_size)
    cut = len(tokens) - len(tokens) // _HELD_OUT_SHARE
    return TokenSplit(tokens[:cut], tokens[cut:])


def load_tokens(path: Path, globs: Sequence[str], target: Path, separator: int, vocab_size: int) -> Tensor:
    """Return the tokens of a folder of text or a token file, int32 [num_tokens].

    Raises ConfigError if it is neither.
    """
    if path.is_dir():
        return encode_files(text_files(path, globs), target, separator)
    if path.suffix != ".npy" or not path.is_file():
        raise ConfigError(f"{path} is neither a folder of text nor a token file (.npy)")
    array = np.load(path, allow_pickle=False)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(f"{path}: expected integers [num_tokens], got {array.dtype} {list(array.shape)}")
    if len(array) and not 0 <= int(array.min()) <= int(array.max()) < vocab_size:
        raise ConfigError(f"{path} has ids from {array.min()} to {array.max()}; the target has {vocab_size}")
    return torch.from_numpy(array.astype(np.int32))


def text_files(folder: Path, globs: Sequence[str]) -> list[Path]:
    """Return all files below ``folder`` whose names match one of ``globs``, sorted.

    Raises ConfigError if none does.
    """
    files = sorted({file for pattern in globs for file in folder.rglob(pattern) if file.is_file()})
    if not files:
        raise ConfigError(f"{folder} has no file named {' or '.join(globs)}")
    return files


def encode_files(files: Sequence[Path], target: Path, separator: int) -> Tensor:
    """Encode texts, each after ``separator``, to int32 [num_tokens].

    Bytes that are not UTF-8 are replaced.
    """
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # A special token's name inside a file is ordinary text.
    tokenizer.no_truncation()
    parts: list[NDArray[np.int32]] = []
    for start in range(0, len(files), _FILES_PER_BATCH):
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in files[start : start + _FILES_PER_BATCH]]
        for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
            parts.append(np.array([separator, *encoding.ids], np.int32))
    return torch.from_numpy(np.concatenate(parts))


class Windows:
    """Random access to the batches of a run.

    Each epoch has every window once, newly shifted and shuffled.
    """

    def __init__(self, tokens: Tensor, window: int, stride: int, batch_size: int, seed: int) -> None:
        """``tokens`` int32 [num_tokens] on the device; ``window`` tokens every ``stride`` tokens.

        Raises ConfigError if there are fewer tokens than one window and one stride.
        """
        self._tokens = tokens
        self._stride = stride
        self._batch_size = batch_size
        self._seed = seed
        self._span = torch.arange(window, device=tokens.device)
        self.num_windows = (len(tokens) - window - stride) // stride + 1
        if self.num_windows < 1:
            raise ConfigError(
                f"{len(tokens)} training tokens are too few for windows of {window}: "
                f"at least {window + stride} are needed"
            )
        self._epoch = -1
        self._starts = torch.empty(0, dtype=torch.int64)

    def batch(self, step: int) -> Tensor:
        """Return batch number ``step``, int64 [batch_size, window]."""
        chosen: list[Tensor] = []
        first, last = step * self._batch_size, (step + 1) * self._batch_size
        while first < last:
            epoch, offset = divmod(first, self.num_windows)
            taken = self._epoch_starts(epoch)[offset : offset + last - first]
            chosen.append(taken)
            first += len(taken)
        return self._tokens[torch.cat(chosen)[:, None] + self._span].long()

    def _epoch_starts(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed((self._seed << 32) + epoch)
            shift = int(torch.randint(self._stride, (1,), generator=generator))
            order = torch.randperm(self.num_windows, generator=generator)
            self._starts = (order * self._stride + shift).to(self._tokens.device)
            self._epoch = epoch
        return self._starts


class MixedWindows:
    """Batches with a share of rows from a second stream.

    As for ``Windows``, they only depend on seed and step.
    """

    def __init__(
        self, streams: Sequence[Tensor], second_share: float, window: int, stride: int, batch_size: int, seed: int
    ) -> None:
        """``streams``: one or two; the second one gives the share ``second_share`` of the rows."""
        second = round(batch_size * second_share)
        counts = (batch_size - second, second)
        self._parts = [
            Windows(tokens, window, stride, count, seed)
            for tokens, count in zip(streams, counts, strict=False)
            if count
        ]

    def batch(self, step: int) -> Tensor:
        """Return batch number ``step``, int64 [batch_size, window]."""
        return torch.cat([part.batch(step) for part in self._parts])


def most_frequent(tokens: Tensor, count: int, vocab_size: int) -> Tensor:
    """Return the ``count`` most frequent ids of ``tokens``, ascending, int64.

    Ties go to the lower id.
    """
    counts = torch.bincount(tokens.long().cpu(), minlength=vocab_size)
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[:count].sort().values
