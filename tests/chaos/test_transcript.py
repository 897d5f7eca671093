"""Readers join the pieces that an API sends and see each broken rule of its protocol."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from protos import common_pb2, gateway_pb2
from tests.chaos.answer import Answer
from tests.chaos.transcript import ErrorEventError, EventStream, GenerateReader, GrpcReader, OpenAiReader, Reader

DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1}}


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def chunk(text: str, ids: list[int], finish: str | None = None, index: int = 0) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": finish}
    choice |= {"token_ids": ids, "token_sources": [0] * len(ids), "token_texts": ["x"] * len(ids)}
    return {"choices": [choice | ({"stop_reason": None} if finish else {})], "usage": None}


CHUNKS = [event(chunk("ab", [1, 2])), event(chunk("c", [3])), event(chunk("", [], "length"))]
LAST = event({"choices": [], "usage": USAGE})


def read(reader: Reader, *parts: bytes) -> Answer:
    stream = EventStream(reader)
    for part in parts:
        stream.feed(part)
    stream.end()
    return reader.answer


def completion(*parts: bytes) -> Answer:
    return read(OpenAiReader(chat=False), *parts)


def test_chunks_are_put_together_whatever_their_borders_and_comments() -> None:
    whole = b": keep-alive\n\n" + b"".join(CHUNKS) + b":\n\n" + LAST + DONE
    for size in (1, 7, len(whole)):
        answer = completion(*(whole[i : i + size] for i in range(0, len(whole), size)))
        choice = answer.choices[0]
        assert (choice.text, choice.token_ids, choice.finish_reason) == ("abc", [1, 2, 3], "length")
        assert (answer.ended, answer.violations, choice.num_finishes) == (True, [], 1)
        assert answer.usage == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


def test_feed_says_which_choices_got_something() -> None:
    stream = EventStream(OpenAiReader(chat=False))
    assert stream.feed(event(chunk("a", [1], index=2)) + event(chunk("", [], index=1))) == [2]


@pytest.mark.parametrize(
    ("parts", "violation"),
    [
        ([*CHUNKS, DONE, DONE], "after [DONE]"),
        ([*CHUNKS, DONE, LAST], "after [DONE]"),
        ([*CHUNKS, event(chunk("d", [4])), DONE], "goes on after its end"),
        ([*CHUNKS, b"data: {"], "within an event"),
        ([*CHUNKS, b"event: x\ndata: {}\n\n", DONE], "no event of one data line"),
        ([event(chunk("", []) | {"usage": USAGE | {"completion_tokens": 4}}), LAST], "usage went back"),
        ([event({"choices": [chunk("a", [1])["choices"][0] | {"token_sources": []}]})], "one source a token"),
    ],
)
def test_broken_rules_of_a_stream_are_seen(parts: list[bytes], violation: str) -> None:
    assert [violation in item for item in completion(*parts).violations] == [True]


def test_a_second_finish_is_counted() -> None:
    assert completion(*CHUNKS, CHUNKS[-1], DONE).choices[0].num_finishes == 2


def test_an_error_event_is_an_error() -> None:
    with pytest.raises(ErrorEventError, match="gone"):
        completion(CHUNKS[0], event({"error": {"message": "gone"}}))


def test_a_chat_begins_once_and_its_entries_are_kept() -> None:
    def delta(value: dict[str, Any], logprobs: list[Any] | None = None) -> bytes:
        entry = {"index": 0, "delta": value, "finish_reason": None}
        return event({"choices": [entry | {"logprobs": logprobs and {"content": logprobs}}]})

    role = delta({"role": "assistant", "content": ""})
    answer = read(OpenAiReader(chat=True), role, delta({"content": "a"}, [{"token": "a"}]), delta({"content": "b"}))
    assert (answer.choices[0].text, answer.choices[0].logprobs, answer.violations) == ("ab", [{"token": "a"}], [])
    assert read(OpenAiReader(chat=True), role, role).violations == ["choice 0 begins twice"]


def test_columns_of_logprobs_become_one_entry_a_token() -> None:
    columns = {"tokens": ["a", "b"], "token_logprobs": [None, -1.5], "top_logprobs": [None, {"b": -1.5}]}
    value = chunk("ab", [1, 2])
    value["choices"][0]["logprobs"] = columns | {"text_offset": [0, 1]}
    assert completion(event(value)).choices[0].logprobs == [["a", None, None, 0], ["b", -1.5, {"b": -1.5}, 1]]


def generated(text: str, ids: list[int], finish: dict[str, Any] | None = None, **meta: Any) -> dict[str, Any]:
    info = {"finish_reason": finish, "prompt_tokens": 2, "completion_tokens": len(ids), **meta}
    return {"text": text, "output_ids": ids, "meta_info": info}


END = {"type": "stop", "matched": "c"}


def test_cumulative_objects() -> None:
    reader = GenerateReader()
    assert [reader.feed(generated("a", [1])), reader.feed(generated("a", [1]))] == [[0], []]
    reader.feed(generated("abc", [1, 2], END))
    choice = reader.answer.choices[0]
    assert (choice.text, choice.token_ids, choice.num_output_tokens) == ("abc", [1, 2], 2)
    assert (choice.finish_reason, choice.stop_reason, reader.answer.violations) == ("stop", "c", [])


def test_a_list_of_objects_is_a_choice_each() -> None:
    reader = GenerateReader()
    reader.feed([generated("a", [1], END), generated("b", [2], END)])
    assert {index: choice.text for index, choice in reader.answer.choices.items()} == {0: "a", 1: "b"}


@pytest.mark.parametrize(
    ("objects", "violation"),
    [
        ([generated("ab", [1]), generated("aX", [1, 2])], "text is no longer"),
        ([generated("a", [1, 2]), generated("ab", [1, 3, 2])], "output_ids is no longer"),
        ([generated("ab", [1, 2]), generated("a", [1, 2])], "text is no longer"),
        ([generated("a", [1], END), generated("a", [1], END)], "after its end"),
        ([generated("a", [1], completion_tokens=2)], "completion_tokens 2"),
    ],
)
def test_broken_rules_of_cumulative_objects_are_seen(objects: list[dict[str, Any]], violation: str) -> None:
    reader = GenerateReader()
    for item in objects:
        reader.feed(item)
    assert [violation in item for item in reader.answer.violations] == [True]


def message(offset: int, ids: list[int], **fields: Any) -> gateway_pb2.GenerateResponse:
    fields = {"num_output_tokens": offset + len(ids), "sources": [0] * len(ids)} | fields
    return gateway_pb2.GenerateResponse(chunk=gateway_pb2.Chunk(offset=offset, token_ids=ids, text="x", **fields))


def complete(**fields: Any) -> gateway_pb2.GenerateResponse:
    fields = {"seed": 4, "request_id": "mine", "num_output_tokens": 3, "num_prompt_tokens": 2} | fields
    reason = common_pb2.FINISH_REASON_LENGTH
    return gateway_pb2.GenerateResponse(complete=gateway_pb2.Complete(reason=reason, **fields))


def grpc_answer(*messages: gateway_pb2.GenerateResponse, logprobs: int | None = None) -> Answer:
    sampling = common_pb2.SamplingParams(seed=4, logprobs=logprobs)
    reader = GrpcReader(gateway_pb2.GenerateRequest(request_id="mine", sampling=sampling))
    for item in messages:
        reader.feed(item)
    return reader.answer


def test_grpc_chunks() -> None:
    entry = common_pb2.TokenLogprobs(token_id=3, logprob=-0.5, rank=1, top_ids=[3], top_logprobs=[-0.5])
    answer = grpc_answer(message(0, [1, 2]), message(2, [3], logprobs=[entry]), complete())
    choice = answer.choices[0]
    assert (choice.text, choice.token_ids, choice.logprobs) == ("xx", [1, 2, 3], [[3, -0.5, 1, [3], [-0.5]]])
    assert (choice.finish_reason, choice.num_finishes, choice.num_output_tokens) == ("FINISH_REASON_LENGTH", 1, 3)
    assert (choice.stop_reason, answer.violations) == (None, [])


@pytest.mark.parametrize(
    ("messages", "violation"),
    [
        ([message(0, [1]), message(2, [2])], "offset 2 after 1 tokens"),
        ([message(0, [1, 2]), message(1, [2])], "offset 1 after 2 tokens"),
        ([message(0, [1], num_output_tokens=2)], "num_output_tokens 2"),
        ([message(0, [1], sources=[])], "one source a token"),
        ([complete(), message(0, [1])], "after its end"),
        ([complete(seed=5)], "seed 5"),
        ([complete(request_id="other")], "'other'"),
    ],
)
def test_broken_rules_of_a_grpc_stream_are_seen(messages: list[gateway_pb2.GenerateResponse], violation: str) -> None:
    assert [violation in item for item in grpc_answer(*messages).violations] == [True]


def test_a_missing_grpc_logprob_is_seen() -> None:
    assert grpc_answer(message(0, [1]), logprobs=1).violations == ["choice 0: not one logprob a token"]
