"""What a load sends: prompts from a file in one of three layouts, or made of random words."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.errors import ConfigError

Message = dict[str, Any]
# Counts a text's tokens.
CountTokens = Callable[[str], int]

# Short common words: one token each in the vocabulary of a large model.
_COMMON = (
    "about after again air all along also always an and another any are around as ask at away back be because been "
    "before began being below between big book both boy but by call came can car carry change city close come could "
    "country cut day did different do does done door down draw each early earth eat end enough even every example "
    "eye face fall family far farm fast father feet few field find fire first fish follow food for form found four "
    "from full game gave get girl give go good got great green ground group grow had half hand hard has have he "
    "head hear help her here high him his home horse hot hour house how idea if important in into is it just keep "
    "kind king know land large last late learn leave left let letter life light like line list little live long "
    "look low made main make man many map mark may me mean men might mile money more morning most mother mountain "
    "move much music must my name near need never new next night no north not now number of off often old on once "
    "one only open or order other our out over own page paper part pass people picture place plain plan plant play "
    "point port press problem pull put question quick rain ran read ready real red rest right river road rock room "
    "round rule run said same saw say school sea second see seem self sentence set she ship short should show side "
    "simple since sing sit size sleep slow small snow so some song soon sound south spell stand star start state "
    "stay step still stop story street strong study such sun sure table take talk tell ten than that the their them "
    "then there these they thing think this those thought three through time to together too took top toward town "
    "travel tree true try turn two under unit until up upon us use very voice wait walk want war warm was watch "
    "water way we week weight well went were west what wheel when where which while white who why wind with woman "
    "wood word work world would write year you young your"
)
WORDS = _COMMON.split()


@dataclass(frozen=True, slots=True)
class LoadPrompt:
    """One request, or a conversation of several.

    Attributes:
        turns: the messages that each request adds.
        output_len: the most tokens of an answer; None: the prompt does not say.
        group: a category, or empty.
    """

    turns: tuple[tuple[Message, ...], ...]
    output_len: int | None = None
    group: str = ""

    @classmethod
    def of_text(cls, *texts: str, output_len: int | None = None, group: str = "") -> LoadPrompt:
        """Return a prompt of one user's texts."""
        turns = tuple(({"role": "user", "content": text},) for text in texts)
        return cls(turns, output_len, group)

    @property
    def text(self) -> str | None:
        """The text of a single request from a user; None if it is more than that."""
        if len(self.turns) == 1 and len(self.turns[0]) == 1 and self.turns[0][0].get("role") == "user":
            content = self.turns[0][0].get("content")
            return content if isinstance(content, str) else None
        return None


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths of random prompts and outputs, in tokens.

    They range from ``ratio`` x the length to the length.
    """

    input_len: int
    output_len: int
    ratio: float = 1.0
    prefix_len: int = 0
    num_prefixes: int = 1

    def draw(self, generator: random.Random) -> tuple[int, int]:
        """Return the lengths of one prompt, without its prefix, and of its output."""
        most = (self.input_len, self.output_len)
        found = [generator.randint(max(1, round(length * self.ratio)), length) for length in most]
        return found[0], found[1]


# From a generator and a number of tokens to a text of about so many.
MakeText = Callable[[random.Random, int], str]


def random_prompts(lengths: Lengths, make_text: MakeText, seed: str) -> Iterator[LoadPrompt]:
    """Yield prompts of random words without end; equal seeds yield equal prompts.

    Each begins with one of ``num_prefixes`` texts, if ``prefix_len`` is not 0. The prefixes are the
    same for every seed.
    """
    common = random.Random("prefixes")
    prefixes = [make_text(common, lengths.prefix_len) for _ in range(lengths.num_prefixes if lengths.prefix_len else 0)]
    generator = random.Random(seed)
    while True:
        num_words, output_len = lengths.draw(generator)
        text = make_text(generator, num_words)
        yield LoadPrompt.of_text(
            f"{generator.choice(prefixes)} {text}" if prefixes else text,
            output_len=output_len,
        )


def repeated(prompts: Sequence[LoadPrompt], seed: str) -> Iterator[LoadPrompt]:
    """Yield prompts in random order without end; each comes again only after all others."""
    generator = random.Random(seed)
    while True:
        yield from generator.sample(prompts, len(prompts))


def words_text(generator: random.Random, num_words: int) -> str:
    """Return random words."""
    return " ".join(generator.choices(WORDS, k=max(1, num_words)))


def text_by_rate(words_per_token: float) -> MakeText:
    """Return a maker of texts whose length is right on average."""
    return lambda generator, num_tokens: words_text(generator, round(num_tokens * words_per_token))


def text_by_count(count: CountTokens) -> MakeText:
    """Return a maker of texts that have the wanted length, or up to a word less."""

    def make(generator: random.Random, num_tokens: int) -> str:
        # A word is at least one token.
        words = generator.choices(WORDS, k=max(1, num_tokens))
        low, high = 1, len(words)
        while low < high:
            middle = (low + high + 1) // 2
            if count(" ".join(words[:middle])) <= num_tokens:
                low = middle
            else:
                high = middle - 1
        return " ".join(words[:low])

    return make


def read_prompts(layout: str, path: Path, count: CountTokens | None) -> list[LoadPrompt]:
    """Read prompts from a file.

    Args:
        layout: "file", "sharegpt" or "speed-bench".
        count: counts the tokens of ShareGPT's replies, which become
            output lengths; None: they don't.

    Raises:
        ConfigError: the file cannot be read, or holds no prompts of this layout.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path: cannot read {path}: {error}") from None
    if layout == "file" and path.suffix not in (".json", ".jsonl"):
        found = [LoadPrompt.of_text(line) for line in text.splitlines() if line.strip()]
    else:
        read = {"file": _from_file, "sharegpt": _from_sharegpt, "speed-bench": _from_speed_bench}[layout]
        found = []
        for number, row in enumerate(_rows(text, path), start=1):
            try:
                prompt = read(row, count)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ConfigError(
                    f"--dataset-path: {path}, entry {number}: no prompt of the layout {layout} ({error!r})"
                ) from None
            if prompt is not None:
                found.append(prompt)
    if not found:
        raise ConfigError(f"--dataset-path: {path} holds no prompts")
    return found


def _rows(text: str, path: Path) -> list[Any]:
    """Return the entries of a JSON list, or of a file with a JSON object a line."""
    try:
        if text.lstrip().startswith("["):
            rows: list[Any] = json.loads(text)
            return rows
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise ConfigError(f"--dataset-path: {path} is neither a JSON list nor JSON lines: {error}") from None


def _from_file(row: Any, count: CountTokens | None) -> LoadPrompt:
    """Read ``{"prompt": text}`` or ``{"messages": [...]}``.

    ``output_len`` and ``category`` are optional.
    """
    if isinstance(row, str):
        return LoadPrompt.of_text(row)
    output_len = row.get("output_len")
    group = str(row.get("category") or "")
    if "messages" in row:
        messages = tuple(dict(message) for message in row["messages"])
        if not messages:
            raise ValueError("no messages")
        return LoadPrompt((messages,), _positive(output_len), group)
    return LoadPrompt.of_text(_text(row["prompt"]), output_len=_positive(output_len), group=group)


def _from_sharegpt(row: Any, count: CountTokens | None) -> LoadPrompt | None:
    """Read a ShareGPT conversation's first question; its reply's length is the output's.

    ``{"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": text}, ...]}``.
    None for one that does not begin with a question and its reply.
    """
    turns: Sequence[dict[str, Any]] = row.get("conversations") or row.get("conversation") or ()
    if len(turns) < 2 or turns[0]["from"] not in ("human", "user") or not turns[0]["value"].strip():
        return None
    reply = _text(turns[1]["value"])
    return LoadPrompt.of_text(turns[0]["value"], output_len=max(1, count(reply)) if count else None)


def _from_speed_bench(row: Any, count: CountTokens | None) -> LoadPrompt:
    """Read a SPEED-Bench question: ``{"question_id": ..., "category": ..., "turns": [text, ...]}``.

    The servers' own answers stand between the turns.
    """
    turns = [_text(turn) for turn in row["turns"]]
    if not turns:
        raise ValueError("no turns")
    return LoadPrompt.of_text(*turns, group=str(row.get("category") or ""))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {value!r}")
    return value


def _positive(value: Any) -> int | None:
    if value is not None and (not isinstance(value, int) or value < 1):
        raise ValueError(f"output_len: expected a whole number of at least 1, got {value!r}")
    return value
