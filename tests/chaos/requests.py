"""Random requests of all kinds, drawn from a seed; their API and JSON suffice to replay them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer, pre_tokenizers

from models.demo.held_out import held_out_prompts
from tests.chaos.answer import Answer

Api = Literal["completions", "chat", "generate", "grpc"]
APIS: tuple[Api, ...] = ("completions", "chat", "generate", "grpc")
NUM_PROMPTS = 24
PROMPT_TOKENS = (20, 240)
MAX_SEQUENCES = 4
# Cumulative objects with logprobs grow with the square of the length.
MAX_TOKENS_OF_CUMULATIVE_LOGPROBS = 100
MAX_STOP_CHARS = 12
# Outputs that end by themselves, and some that do not.
REGEXES = (r"[a-z_]{3,12}\([a-z, ]{0,40}\)", r"(def [a-z_]+\(self\):\n    pass\n){1,9}", r"[0-9 ,]+", r"(.|\n){50,400}")
# Begins some prompts, so that outputs hold characters of several tokens.
FOREIGN = '"""Größe der Fläche in m², 漢字かな交じり文 😀."""\n'


@dataclass(frozen=True, slots=True)
class Request:
    """One request as sent. ``body`` is the REST body, or the gRPC message as JSON.

    Attributes:
        wants_stop: it gets a stop string from its output without one.
    """

    number: int
    api: Api
    stream: bool
    body: dict[str, Any]
    wants_stop: bool = False

    @property
    def kind(self) -> str:
        """Return the API and the answer's form, for tables."""
        return f"{self.api}, {'streamed' if self.stream else 'whole'}"


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A request's content, independent of its API. None: the server's default."""

    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    as_ids: bool
    sampling: dict[str, Any]
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    logprobs: int | None
    with_prompt_logprobs: bool
    n: int
    speculative: dict[str, Any]
    cache_salt: str | None
    include_stop: bool
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    stream: bool
    usage: str
    token_sources: bool
    # A regular expression that the output must match, in the end.
    regex: str | None


@dataclass(frozen=True, slots=True)
class Material:
    """Prompts from held-out files, and tokens that are parts of characters."""

    prompts: tuple[tuple[str, tuple[int, ...]], ...]
    part_ids: tuple[int, ...]
    word_ids: tuple[int, ...] = field(repr=False)

    @classmethod
    def load(cls, model: Path, seed: int) -> Material:
        """Load the material with a checkpoint's tokenizer."""
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        found = held_out_prompts(
            tokenizer, NUM_PROMPTS, min_tokens=PROMPT_TOKENS[0], max_tokens=PROMPT_TOKENS[1], seed=seed
        )
        parts = [
            tokenizer.token_to_id(letter) for letter in pre_tokenizers.ByteLevel.alphabet() if not letter.isascii()
        ]
        prompts = [(prompt.text, prompt.token_ids) for prompt in found]
        for text, _ in prompts[:4]:
            foreign = FOREIGN + text
            prompts.append((foreign, tuple(tokenizer.encode(foreign, add_special_tokens=False).ids)))
        words = range(300, tokenizer.get_vocab_size())
        return cls(tuple(prompts), tuple(part for part in parts if part is not None), tuple(words))


def draw_requests(count: int, seed: int, material: Material) -> list[Request]:
    """Draw ``count`` requests. A seed's request ``i`` does not depend on the count."""
    return [_draw(number, random.Random(f"request {seed} {number}"), material) for number in range(count)]


def with_stop(request: Request, answer: Answer, seed: int) -> Request:
    """Return the request with a stop string out of its ``answer``; unchanged if that is empty."""
    generator = random.Random(f"stop {seed} {request.number}")
    texts = [choice.text for choice in answer.choices.values() if choice.text]
    if request.body.get("echo"):
        # The prompt is no output: only later text can match.
        texts = [text[len(text) // 2 :] for text in texts]
    if not texts:
        return request
    text = generator.choice(texts)
    start = generator.randrange(len(text) // 4, max(len(text) * 3 // 4, len(text) // 4 + 1))
    found = text[start : start + generator.randint(1, MAX_STOP_CHARS)]
    stops = [found, "a string that never comes"]
    generator.shuffle(stops)
    body = dict(request.body)
    if request.api == "generate":
        body["sampling_params"] = {**body["sampling_params"], "stop": stops}
    else:
        body["stop"] = stops
    return dataclasses.replace(request, body=body)


def _draw(number: int, generator: random.Random, material: Material) -> Request:
    api = APIS[number % len(APIS)]
    spec = _spec(api, generator, material)
    body = {"completions": _completion, "chat": _chat, "generate": _generate, "grpc": _grpc}[api](spec, number)
    return Request(number, api, spec.stream or api == "grpc", body, wants_stop=generator.random() < 0.3)


def _spec(api: Api, generator: random.Random, material: Material) -> RequestSpec:
    num_prompts = generator.choice((1, 1, 1, 1, 2)) if api in ("completions", "generate") else 1
    n = generator.choices((1, 2, 3), (6, 2, 2))[0]
    prompts = generator.sample(material.prompts, num_prompts)
    stream = generator.random() < 0.75
    logprobs = generator.choice((None, None, None, 0, 1, 5))
    max_tokens = generator.randint(1, 16) if generator.random() < 0.15 else generator.randint(40, 480)
    if logprobs is not None and api == "generate":
        max_tokens = min(max_tokens, MAX_TOKENS_OF_CUMULATIVE_LOGPROBS)
    return RequestSpec(
        texts=tuple(text for text, _ in prompts),
        ids=tuple(ids for _, ids in prompts),
        as_ids=generator.random() < 0.4,
        sampling=_sampling(generator, material),
        max_tokens=max_tokens,
        min_tokens=generator.choice((0, 0, 0, max_tokens // 2)),
        ignore_eos=generator.random() < 0.5,
        logprobs=logprobs,
        with_prompt_logprobs=logprobs is not None and generator.random() < 0.5,
        n=min(n, MAX_SEQUENCES // num_prompts),
        speculative=_speculative(generator),
        cache_salt=generator.choice((None, None, "one", "two", f"salt {generator.random()}")),
        include_stop=generator.random() < 0.5,
        stop=("never said by any model",) if generator.random() < 0.3 else (),
        stop_token_ids=tuple(generator.sample(material.word_ids, generator.choice((0, 0, 8)))),
        stream=stream,
        usage=generator.choice(("none", "last", "last", "continuous")),
        token_sources=generator.random() < 0.75,
        regex=generator.choice(REGEXES) if generator.random() < 0.15 else None,
    )


def _sampling(generator: random.Random, material: Material) -> dict[str, Any]:
    """Draw the fields with one name in all APIs; ``logit_bias`` has integer keys."""
    sampling: dict[str, Any] = {"temperature": generator.choice((0.0, 0.0, 0.0, 0.6, 0.8, 1.0, 1.5))}
    optional: dict[str, Any] = {
        "top_k": generator.choice((1, 20, 200)),
        "top_p": generator.choice((0.5, 0.9, 0.99)),
        "min_p": generator.choice((0.02, 0.2)),
        "presence_penalty": generator.choice((-0.5, 0.7)),
        "frequency_penalty": generator.choice((0.1, 0.5)),
        "repetition_penalty": generator.choice((1.1, 1.3)),
        "logit_bias": _logit_bias(generator, material),
    }
    return sampling | {name: value for name, value in optional.items() if generator.random() < 0.2}


def _logit_bias(generator: random.Random, material: Material) -> dict[int, float]:
    """Draw a bias; half of them make parts of characters likely, incomplete or in pairs."""
    if generator.random() < 0.5:
        return {token: 7.0 for token in generator.sample(material.part_ids, 12)}
    return {token: generator.uniform(-100.0, 3.0) for token in generator.sample(material.word_ids, 20)}


def _speculative(generator: random.Random) -> dict[str, Any]:
    return generator.choice(
        (
            {},
            {},
            {},
            {"enabled": True, "drafter": generator.choice(("ngram", "eagle3", "merge", "eagle3+ngram"))},
            {"max_draft_tokens": generator.randint(0, 7)},
            {"enabled": False},
        )
    )


def _completion(spec: RequestSpec, number: int) -> dict[str, Any]:
    prompts = [list(ids) for ids in spec.ids] if spec.as_ids else list(spec.texts)
    body = _openai(spec, number) | {"prompt": prompts if len(prompts) > 1 else prompts[0]}
    if spec.logprobs is not None:
        body["logprobs"] = spec.logprobs
    if spec.with_prompt_logprobs:
        body["echo"] = True
    return body


def _chat(spec: RequestSpec, number: int) -> dict[str, Any]:
    body = _openai(spec, number) | {"messages": [{"role": "user", "content": spec.texts[0]}]}
    if spec.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": spec.logprobs}
    return body


def _openai(spec: RequestSpec, number: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "max_tokens": spec.max_tokens,
        "min_tokens": spec.min_tokens,
        "ignore_eos": spec.ignore_eos,
        "seed": number,
        "n": spec.n,
        "stream": spec.stream,
        "stop": list(spec.stop),
        "stop_token_ids": list(spec.stop_token_ids),
        "include_stop_str_in_output": spec.include_stop,
        "return_token_sources": spec.token_sources,
        "speculative": spec.speculative,
        "cache_salt": spec.cache_salt,
        **_with_text_keys(spec.sampling),
    }
    if spec.regex is not None:
        body["structured_outputs"] = {"regex": spec.regex}
    if spec.stream and spec.usage != "none":
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": spec.usage == "continuous"}
    return body


def _generate(spec: RequestSpec, number: int) -> dict[str, Any]:
    sampling = {
        "max_new_tokens": spec.max_tokens,
        "min_new_tokens": spec.min_tokens,
        "ignore_eos": spec.ignore_eos,
        "sampling_seed": number,
        "n": spec.n,
        "stop": list(spec.stop),
        "stop_token_ids": list(spec.stop_token_ids),
        "no_stop_trim": spec.include_stop,
        **_with_text_keys(spec.sampling),
    }
    if spec.regex is not None:
        sampling["regex"] = spec.regex
    prompts = [list(ids) for ids in spec.ids] if spec.as_ids else list(spec.texts)
    body: dict[str, Any] = {
        "input_ids" if spec.as_ids else "text": prompts if len(prompts) > 1 else prompts[0],
        "sampling_params": sampling,
        "stream": spec.stream,
        "speculative": spec.speculative,
        "cache_salt": spec.cache_salt,
    }
    if spec.logprobs is not None:
        body |= {"return_logprob": True, "top_logprobs_num": spec.logprobs, "return_text_in_logprobs": True}
        body["logprob_start_len"] = 0 if spec.with_prompt_logprobs else -1
    return body


def _grpc(spec: RequestSpec, number: int) -> dict[str, Any]:
    sampling = {
        "max_tokens": spec.max_tokens,
        "min_tokens": spec.min_tokens,
        "ignore_eos": spec.ignore_eos,
        "seed": number,
        "stop_token_ids": list(spec.stop_token_ids),
        **_with_text_keys(spec.sampling),
    }
    if spec.regex is not None:
        sampling["regex"] = spec.regex
    if spec.logprobs is not None:
        sampling["logprobs"] = spec.logprobs
        if spec.with_prompt_logprobs:
            sampling["prompt_logprobs"] = spec.logprobs
    prompt = {"token_ids": {"ids": list(spec.ids[0])}} if spec.as_ids else {"text": spec.texts[0]}
    body = {
        **prompt,
        "sampling": sampling,
        "speculation": spec.speculative,
        "stop": list(spec.stop),
        "include_stop_str_in_output": spec.include_stop,
        "n": spec.n,
        "request_id": f"chaos-{number}",
    }
    return body if spec.cache_salt is None else body | {"cache_salt": spec.cache_salt}


def _with_text_keys(sampling: dict[str, Any]) -> dict[str, Any]:
    if "logit_bias" not in sampling:
        return sampling
    return {**sampling, "logit_bias": {str(token): bias for token, bias in sampling["logit_bias"].items()}}


def num_sequences(requests: Sequence[Request]) -> int:
    """Return the number of sequences of all requests together."""
    return sum(_num_prompts(request) * _n(request) for request in requests)


def _n(request: Request) -> int:
    return int((request.body["sampling_params"] if request.api == "generate" else request.body).get("n", 1))


def _num_prompts(request: Request) -> int:
    prompts = request.body.get("prompt", request.body.get("input_ids", request.body.get("text", "")))
    return len(prompts) if isinstance(prompts, list) and not isinstance(prompts[0], int) else 1
