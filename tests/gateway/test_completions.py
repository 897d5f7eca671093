"""POST /v1/completions, whole and streamed, over real HTTP."""

from __future__ import annotations

import asyncio
import math
import time

import pytest

from protos import common_pb2, verifier_pb2
from tests.gateway.conftest import Stack, events
from tests.gateway.scripted_verifier import LENGTH, STOP, Player, steps

pytestmark = pytest.mark.anyio
URL = "/v1/completions"
STATS = common_pb2.SpeculationStats(
    num_decode_steps=5,
    num_spec_steps=4,
    num_draft_tokens=12,
    num_accepted_tokens=6,
    fallback_steps=1,
    fallback_reasons={"first_step": 1},
    acceptance_histogram=[1, 1, 1, 1],
    drafter="ngram",
    num_decode_tokens=11,
    drafters=[
        common_pb2.DrafterStats(
            name="ngram", num_draft_tokens=12, num_accepted_tokens=6, accepted_per_position=[3, 2, 1]
        )
    ],
)


async def test_whole_answer(stack: Stack) -> None:
    stack.verifier.script = steps(stack.ids("hel"), stack.ids("lo wor"), stack.ids("ld"), reason=STOP, stats=STATS)
    asked = time.monotonic()
    answer = await stack.http.post(URL, json={"model": "tiny", "prompt": "def add", "max_tokens": 50, "seed": 7})
    took_ms = math.ceil(1e3 * (time.monotonic() - asked))
    assert answer.status_code == 200
    body = answer.json()
    assert body["object"] == "text_completion" and body["model"] == "tiny" and body["id"].startswith("cmpl-")
    (choice,) = body["choices"]
    assert (choice["index"], choice["text"], choice["finish_reason"]) == (0, "hello world", "stop")
    num_tokens = len(stack.ids("hel")) + len(stack.ids("lo wor")) + len(stack.ids("ld"))
    num_prompt = len(stack.ids("def add"))
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt + num_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
    }
    assert body["metrics"]["speculative_decoding"] == {
        "num_resumes": 0,
        "mean_acceptance_length": 2.5,
        "draft_acceptance_rate": 0.5,
        "acceptance_histogram": [1, 1, 1, 1],
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 6,
        "num_draft_tokens": 12,
        "num_spec_tokens": 3,
        "drafter": "ngram",
        "drafters": {
            "ngram": {"num_draft_tokens": 12, "num_accepted_draft_tokens": 6, "accepted_per_position": [3, 2, 1]}
        },
        "fallback_steps": 1,
        "fallback_reasons": {"first_step": 1},
        "mean_tokens_per_step": 2.2,
    }
    assert body["metrics"]["queue_time_ms"] == 1.5
    assert body["metrics"]["time_to_first_token_ms"] > 0
    # Tokens of the first message took no time after it.
    behind_first = num_tokens - len(stack.ids("hel"))
    assert len(stack.ids("hel")) > 1
    assert body["metrics"]["generation_time_ms"] == pytest.approx(behind_first * body["metrics"]["mean_itl_ms"])
    # The verifier took 3.5 ms: tokens that arrive together were no faster than that.
    slowest_ms = max(body["metrics"]["mean_itl_ms"], 3.5 / (num_tokens - 1))
    assert body["metrics"]["tokens_per_second"] == pytest.approx(1e3 / slowest_ms)
    (sequence,) = stack.verifier.submitted
    assert list(sequence.prompt_token_ids) == stack.ids("def add")
    assert (sequence.sampling.seed, sequence.sampling.max_tokens, sequence.choice_index) == (7, 50, 0)
    # What is left when the verifier is asked.
    assert 600_000 - took_ms <= sequence.timeout_ms <= 600_000


async def test_nothing_drafted_is_one_and_zero(stack: Stack) -> None:
    stack.verifier.script = steps([5], reason=LENGTH)
    body = (await stack.http.post(URL, json={"prompt": "a"})).json()
    figures = body["metrics"]["speculative_decoding"]
    assert (figures["mean_acceptance_length"], figures["draft_acceptance_rate"]) == (1.0, 0.0)
    assert (figures["mean_tokens_per_step"], figures["num_spec_tokens"]) == (1.0, 0)
    assert stack.verifier.submitted[0].sampling.max_tokens == 16


async def test_stream_has_one_chunk_a_step_and_metrics_in_the_last(stack: Stack) -> None:
    runs = [stack.ids("hello"), stack.ids(" world, h"), stack.ids("ere")]
    stack.verifier.script = steps(*runs)
    answer = await stack.http.post(URL, json={"prompt": "a", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    chunks = events(answer.text)
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert "".join(c["choices"][0]["text"] for c in chunks) == "hello world, here"
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert [("metrics" in c, "usage" in c) for c in chunks] == [(False, False)] * (len(chunks) - 1) + [(True, False)]


async def test_include_usage_adds_one_last_chunk(stack: Stack) -> None:
    stack.verifier.script = steps(stack.ids("hello"), stack.ids(" world"))
    body = {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events((await stack.http.post(URL, json=body)).text)
    assert all(chunk["usage"] is None and "metrics" not in chunk for chunk in chunks)
    assert last["choices"] == [] and "speculative_decoding" in last["metrics"]
    assert last["usage"]["completion_tokens"] == len(stack.ids("hello")) + len(stack.ids(" world"))


async def test_continuous_usage_counts_tokens_not_chunks(stack: Stack) -> None:
    runs = [stack.ids("hello wor"), stack.ids("ld, here is"), stack.ids(" more")]
    stack.verifier.script = steps(*runs)
    body = {"prompt": "a", "stream": True, "stream_options": {"continuous_usage_stats": True}}
    chunks = events((await stack.http.post(URL, json=body)).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    totals = {sum(map(len, runs[: i + 1])) for i in range(len(runs))}
    assert counts == sorted(counts) and set(counts) <= totals and counts[-1] == sum(map(len, runs))


async def test_stop_string_inside_an_accepted_run_trims_text_logprobs_and_usage(stack: Stack) -> None:
    run = [*stack.ids("hello st"), *stack.ids("op there")]

    async def play(player: Player) -> None:
        player.tokens(run, logprobs=[common_pb2.TokenLogprobs(token_id=i, logprob=-1.0, rank=1) for i in run])
        await player.aborted.wait()
        player.finish(reason=common_pb2.FINISH_REASON_ABORT, stats=STATS)

    stack.verifier.script = play
    kept = next(k for k in range(len(run)) if "stop" in stack.tokenizer.decode(run[:k]))
    assert kept < len(run)
    body = {"prompt": "a", "stop": ["nothing", "stop"], "logprobs": 0}
    answer = (await stack.http.post(URL, json=body)).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hello ", "stop", "stop")
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"] == kept
    assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] == 12
    (abort,) = stack.verifier.aborts
    assert abort.kept_tokens == kept

    answer = (await stack.http.post(URL, json={**body, "include_stop_str_in_output": True})).json()
    assert answer["choices"][0]["text"] == "hello stop"

    chunks = events((await stack.http.post(URL, json={**body, "stream": True})).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello "
    assert sum(len(chunk["choices"][0]["logprobs"]["tokens"]) for chunk in chunks) == kept


async def test_text_that_may_begin_a_stop_string_is_held_back(stack: Stack) -> None:
    gate = asyncio.Event()

    async def play(player: Player) -> None:
        player.tokens(stack.ids("hello sto"))
        await gate.wait()
        player.tokens(stack.ids("ne"))
        player.finish(LENGTH)

    stack.verifier.script = play
    body = {"prompt": "a", "stop": "stop", "stream": True}
    async with stack.http.stream("POST", URL, json=body) as answer:
        texts = []
        async for line in answer.aiter_lines():
            if '"text"' in line:
                texts.append(line.split('"text":"')[1].split('"')[0])
                gate.set()
    assert texts[0] == "hello " and "".join(texts) == "hello stone"


async def test_min_tokens_puts_off_stop_strings(stack: Stack) -> None:
    run = [*stack.ids("stop it"), *stack.ids(" and stop"), *stack.ids(" more")]
    stack.verifier.script = steps(run)
    first = len(stack.ids("stop it"))
    body = {"prompt": "a", "stop": "stop", "min_tokens": first, "max_tokens": 50}
    choice = (await stack.http.post(URL, json=body)).json()["choices"][0]
    assert choice["text"] == "stop it and "


async def test_unfinished_character_at_the_end_becomes_a_replacement(stack: Stack) -> None:
    ids = stack.ids("日")
    stack.verifier.script = steps(stack.ids("a"), ids[:-1])
    body = {"prompt": "a", "stream": True}
    chunks = events((await stack.http.post(URL, json=body)).text)
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == "a\ufffd" == stack.tokenizer.decode([*stack.ids("a"), *ids[:-1]])
    assert not any("\ufffd" in text for text in texts[:-1])


async def test_prompt_lists_and_choices_are_numbered_prompt_by_prompt(stack: Stack) -> None:
    async def play(player: Player) -> None:
        player.tokens([player.sequence.prompt_token_ids[0], 65 + player.sequence.choice_index])
        player.finish(LENGTH)

    stack.verifier.script = play
    for prompt in (["hello", "stop"], [stack.ids("hello"), stack.ids("stop")]):
        stack.verifier.submitted.clear()
        body = (await stack.http.post(URL, json={"prompt": prompt, "n": 2, "seed": 3})).json()
        firsts = [stack.ids("hello")[0], stack.ids("hello")[0], stack.ids("stop")[0], stack.ids("stop")[0]]
        expected = [stack.tokenizer.decode([first, 65 + i % 2]) for i, first in enumerate(firsts)]
        assert [choice["text"] for choice in body["choices"]] == expected
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert body["usage"]["prompt_tokens"] == len(stack.ids("hello")) + len(stack.ids("stop"))
        assert body["usage"]["completion_tokens"] == 8
        assert "metrics" not in body
        assert {(s.request_id, s.choice_index) for s in stack.verifier.submitted} == {
            (f"{body['id']}-{number}", choice) for number in (0, 1) for choice in (0, 1)
        }
        assert {s.sampling.seed for s in stack.verifier.submitted} == {3}


async def test_id_prompt_goes_up_as_it_is(stack: Stack) -> None:
    assert (await stack.http.post(URL, json={"prompt": [5, 6, 7]})).status_code == 200
    assert list(stack.verifier.submitted[0].prompt_token_ids) == [5, 6, 7]


async def test_drawn_seeds_differ_and_are_not_negative(stack: Stack) -> None:
    for _ in range(2):
        await stack.http.post(URL, json={"prompt": "a", "seed": None})
    first, second = (sequence.sampling.seed for sequence in stack.verifier.submitted)
    assert first != second and min(first, second) >= 0


async def test_every_sampling_field_reaches_the_verifier(stack: Stack) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.5,
        "seed": -5,
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True,
        "logprobs": 3,
    }
    body = {"prompt": "a", **fields, "logit_bias": {"7": -100, "8": 1.5}, "stop_token_ids": [9], "cache_salt": "me"}
    shape = {"num_steps": 5, "topk": 2, "num_draft_tokens": 8}
    body["speculative"] = {"enabled": False, "drafter": "ngram", "max_draft_tokens": 0, "shape": shape}
    assert (await stack.http.post(URL, json=body)).status_code == 200
    sequence = stack.verifier.submitted[0]
    assert {name: getattr(sequence.sampling, name) for name in fields} == fields
    assert dict(sequence.sampling.logit_bias) == {7: -100.0, 8: 1.5}
    assert list(sequence.sampling.stop_token_ids) == [9] and sequence.cache_salt == "me"
    options = sequence.speculation
    assert (options.enabled, options.drafter, options.max_draft_tokens) == (False, "ngram", 0)
    assert options.HasField("max_draft_tokens") and {name: getattr(options.shape, name) for name in shape} == shape


async def test_newer_token_limit_wins_and_the_context_cuts_both(stack: Stack) -> None:
    await stack.http.post(URL, json={"prompt": "a", "max_tokens": 5, "max_completion_tokens": 6})
    await stack.http.post(URL, json={"prompt": [1] * 120, "max_tokens": 1000, "min_tokens": 900})
    first, second = (sequence.sampling for sequence in stack.verifier.submitted)
    assert first.max_tokens == 6
    assert (second.max_tokens, second.min_tokens) == (8, 8)


async def test_echo_with_logprobs_scores_the_prompt(stack: Stack) -> None:
    prompt = stack.ids("hello")[:1] + stack.ids(" world")

    async def play(player: Player) -> None:
        entries = [
            common_pb2.TokenLogprobs(token_id=i, logprob=-0.5, rank=1, top_ids=[i], top_logprobs=[-0.5])
            for i in prompt[1:]
        ]
        sampled = common_pb2.TokenLogprobs(token_id=66, logprob=-3.0, rank=2, top_ids=[65], top_logprobs=[-0.25])
        player.tokens([66], logprobs=[sampled], prompt_logprobs=entries)
        player.finish(LENGTH)

    stack.verifier.script = play
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    choice = (await stack.http.post(URL, json=body)).json()["choices"][0]
    sampling = stack.verifier.submitted[0].sampling
    assert (sampling.prompt_logprobs, sampling.logprobs, sampling.ignore_eos) == (1, 1, True)
    text = stack.tokenizer.decode(prompt)
    last = stack.tokenizer.decode([66])
    assert choice["text"] == text + last
    lists = choice["logprobs"]
    assert lists["token_logprobs"] == [None, *[-0.5] * (len(prompt) - 1), -3.0]
    assert lists["tokens"] == [stack.tokenizer.decode([i]) for i in prompt] + [last]
    assert lists["top_logprobs"][0] is None
    assert lists["top_logprobs"][-1] == {last: -3.0, stack.tokenizer.decode([65]): -0.25}
    assert lists["text_offset"] == [len(stack.tokenizer.decode(prompt[:k])) for k in range(len(prompt) + 1)]

    chunks = events((await stack.http.post(URL, json={**body, "stream": True})).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text + last
    columns = [chunk["choices"][0]["logprobs"]["token_logprobs"] for chunk in chunks]
    assert [value for column in columns for value in column] == lists["token_logprobs"]


async def test_echo_without_output_shows_the_prompt_alone(stack: Stack) -> None:
    """OpenAI's way to score a text: ``max_tokens`` is 0."""
    prompt = stack.ids("hello")[:1] + stack.ids(" world")

    async def play(player: Player) -> None:
        entries = [common_pb2.TokenLogprobs(token_id=i, logprob=-0.5, rank=1) for i in prompt[1:]]
        sampled = common_pb2.TokenLogprobs(token_id=66, logprob=-3.0, rank=2)
        player.tokens([66], logprobs=[sampled], prompt_logprobs=entries, sources=[0])
        player.finish(LENGTH)

    stack.verifier.script = play
    body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 0, "return_token_ids": True}
    answer = (await stack.http.post(URL, json=body)).json()
    (choice,) = answer["choices"]
    sampling = stack.verifier.submitted[0].sampling
    assert (sampling.max_tokens, sampling.prompt_logprobs, sampling.ignore_eos) == (1, 0, True)
    assert (choice["text"], choice["token_ids"]) == (stack.tokenizer.decode(prompt), [])
    assert choice["logprobs"]["token_logprobs"] == [None, *[-0.5] * (len(prompt) - 1)]
    assert answer["usage"]["completion_tokens"] == 0 and answer["usage"]["total_tokens"] == len(prompt)

    more = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events((await stack.http.post(URL, json=body | more)).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    assert last["usage"] == answer["usage"]
    for fields in ({"echo": False}, {"max_completion_tokens": 0}, {"max_completion_tokens": 3}):
        refused = await stack.http.post(URL, json=body | fields)
        assert refused.status_code == 400, fields


async def test_parts_of_characters_keep_apart_in_top_logprobs(stack: Stack) -> None:
    first, second = (
        next(i for i in range(256) if stack.tokenizer.token_text(i)[1] == bytes([b])) for b in (0xE2, 0xF0)
    )
    entry = common_pb2.TokenLogprobs(token_id=first, logprob=-1.0, rank=1, top_ids=[first, second])
    entry.top_logprobs.extend([-1.0, -2.0])

    async def play(player: Player) -> None:
        player.tokens([first], logprobs=[entry])
        player.finish(LENGTH)

    stack.verifier.script = play
    choice = (await stack.http.post(URL, json={"prompt": "a", "logprobs": 2})).json()["choices"][0]
    assert choice["logprobs"]["top_logprobs"] == [{"bytes:\\xe2": -1.0, "bytes:\\xf0": -2.0}]
    assert choice["text"] == "\ufffd"


async def test_token_sources_come_with_every_chunk_if_asked(stack: Stack) -> None:
    async def play(player: Player) -> None:
        player.tokens(stack.ids("a"), sources=[0])
        player.tokens([65, 66, 67], sources=[1, 1, 0])
        player.finish(LENGTH)

    stack.verifier.script = play
    body = {"prompt": "a", "stream": True, "return_token_sources": True}
    choices = [chunk["choices"][0] for chunk in events((await stack.http.post(URL, json=body)).text)]
    assert [i for choice in choices for i in choice["token_ids"]] == [*stack.ids("a"), 65, 66, 67]
    assert [i for choice in choices for i in choice["token_sources"]] == [0, 1, 1, 0]
    names = [name for choice in choices for name in choice["token_drafters"]]
    assert names == [None, "ngram", "ngram", None]
    for choice in choices:
        assert len(choice["token_texts"]) == len(choice["token_ids"])
        assert choice["text"].startswith("".join(choice["token_texts"]))
    plain = (await stack.http.post(URL, json={"prompt": "a"})).json()["choices"][0]
    assert "token_sources" not in plain and "token_ids" not in plain


@pytest.mark.parametrize("stream", [False, True])
async def test_the_newest_draft_tree_comes_if_asked(stack: Stack, stream: bool) -> None:
    a, b, c = (stack.ids(letter)[0] for letter in "abc")
    tree = verifier_pb2.VerifiedTree(token_ids=[a, b, c], parents=[-1, 0, 0], sources=[0, 1, 1], accepted=[1])

    async def play(player: Player) -> None:
        player.tokens([a])
        player.tokens([b, c], tree=tree if player.sequence.return_trees else None)
        player.finish(LENGTH)

    stack.verifier.script = play
    found = []
    for wanted in (True, False):
        answer = await stack.http.post(URL, json={"prompt": "a", "stream": stream, "return_draft_tree": wanted})
        chunks = events(answer.text) if stream else [answer.json()]
        found.append([chunk["choices"][0] for chunk in chunks])
    shown = [choice["draft_tree"] for choice in found[0]]
    assert [tree for tree in shown if tree] == [
        {
            "token_ids": [a, b, c],
            "parents": [-1, 0, 0],
            "sources": [0, 1, 1],
            "accepted": [1],
            "drafters": [None, "ngram", "ngram"],
            "token_texts": ["a", "b", "c"],
        }
    ]
    assert not any("draft_tree" in choice for choice in found[1])
    assert [sequence.return_trees for sequence in stack.verifier.submitted] == [True, False]


async def test_predicted_tokens_are_marked(stack: Stack) -> None:
    ids = stack.ids("def add(first, second)")
    other = stack.ids("x")[0]
    stack.verifier.script = steps(ids[:2], [other], ids[3:])
    body = {"prompt": "a", "max_tokens": 50, "return_token_sources": True}
    prediction = {"type": "content", "content": "def add(first, second)"}
    choice = (await stack.http.post(URL, json={**body, "prediction": prediction})).json()["choices"][0]
    assert choice["token_predicted"] == [True, True, False, *[True] * len(ids[3:])]
    without = (await stack.http.post(URL, json=body)).json()["choices"][0]
    assert "token_predicted" not in without


async def test_special_tokens_show_only_if_asked(stack: Stack) -> None:
    stack.verifier.script = steps(stack.ids("a<|user|>b"))
    hidden = (await stack.http.post(URL, json={"prompt": "a"})).json()["choices"][0]["text"]
    shown = (await stack.http.post(URL, json={"prompt": "a", "skip_special_tokens": False})).json()["choices"][0][
        "text"
    ]
    assert (hidden, shown) == ("ab", "a<|user|>b")


@pytest.mark.parametrize("stream", [False, True])
async def test_cached_tokens_are_counted_once_for_each_prompt(stack: Stack, stream: bool) -> None:
    async def play(player: Player) -> None:
        # A later choice finds the first one's computed prompt.
        sequence = player.sequence
        cached = (7 if sequence.choice_index else 2) + (len(sequence.prompt_token_ids) == 3)
        player.tokens([65], num_cached_tokens=cached)
        player.finish(LENGTH, num_cached_tokens=cached)

    stack.verifier.script = play
    for prompts, cached in (([[1, 2]], 2), ([[1, 2], [1, 2, 3]], 5)):
        body = {"prompt": prompts, "n": 3, "stream": stream, "stream_options": {"include_usage": True}}
        answer = await stack.http.post(URL, json=body if stream else {"prompt": prompts, "n": 3})
        usage = events(answer.text)[-1]["usage"] if stream else answer.json()["usage"]
        assert usage["prompt_tokens"] == sum(map(len, prompts))
        assert usage["completion_tokens"] == 3 * len(prompts)
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached


async def test_stop_token_is_named_and_times_are_finite(stack: Stack) -> None:
    async def play(player: Player) -> None:
        player.finish(STOP, stop_token_id=0, num_cached_tokens=1)

    stack.verifier.script = play
    body = (await stack.http.post(URL, json={"prompt": "hello world"})).json()
    assert (body["choices"][0]["text"], body["choices"][0]["stop_reason"]) == ("", 0)
    assert body["usage"]["completion_tokens"] == 0
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
    times = [value for key, value in body["metrics"].items() if key != "speculative_decoding" and value is not None]
    assert all(math.isfinite(value) for value in times)
