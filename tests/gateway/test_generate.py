"""POST /generate in SGLang's shape, and the tokenizer's endpoints."""

from __future__ import annotations

import pytest

from protos import common_pb2
from tests.gateway.conftest import Stack, events
from tests.gateway.scripted_verifier import LENGTH, STOP, Player, steps

pytestmark = pytest.mark.anyio
STATS = common_pb2.SpeculationStats(num_decode_steps=2, num_spec_steps=2, num_draft_tokens=8, num_accepted_tokens=4)


async def test_generate_reports_meta_info(stack: Stack) -> None:
    run = stack.ids("hello world")
    stack.verifier.script = steps(run[:1], run[1:], reason=LENGTH, stats=STATS)
    sampling = {"max_new_tokens": 50, "temperature": 0, "ignore_eos": True, "stop": None}
    body = {"text": "def add", "sampling_params": sampling, "lora_path": None, "return_logprob": False}
    # As SGLang's bench_serving sends it.
    body |= {"return_routed_experts": False, "logprob_start_len": -1, "image_data": []}
    answer = (await stack.http.post("/generate", json=body)).json()
    assert (answer["text"], answer["output_ids"]) == ("hello world", run)
    info = answer["meta_info"]
    assert info["finish_reason"] == {"type": "length", "length": len(run)}
    assert (info["prompt_tokens"], info["completion_tokens"]) == (len(stack.ids("def add")), len(run))
    assert (info["spec_verify_ct"], info["spec_accept_length"]) == (2, len(run) / 2)
    sequence = stack.verifier.submitted[0].sampling
    assert (sequence.max_tokens, sequence.temperature, sequence.ignore_eos) == (50, 0, True)


async def test_generate_cuts_a_token_limit_beyond_the_context(stack: Stack) -> None:
    body = {"input_ids": [5] * 120, "sampling_params": {"max_new_tokens": 100_000}}
    answer = (await stack.http.post("/generate", json=body)).json()
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert stack.verifier.submitted[0].sampling.max_tokens == 8


async def test_generate_stops_and_streams_cumulative_text(stack: Stack) -> None:
    stack.verifier.script = steps(stack.ids("hello"), stack.ids(" stop"), stack.ids(" more"), stats=STATS)
    body = {"input_ids": [5, 6], "sampling_params": {"stop": "stop"}, "stream": True}
    answers = events((await stack.http.post("/generate", json=body)).text)
    texts = [answer["text"] for answer in answers]
    assert texts[-1] == "hello " and all(texts[-1].startswith(text) for text in texts)
    counts = [answer["meta_info"]["completion_tokens"] for answer in answers]
    assert counts == sorted(counts)
    assert answers[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": "stop"}
    assert all(answer["meta_info"]["finish_reason"] is None for answer in answers[:-1])


async def test_generate_lists_and_choices(stack: Stack) -> None:
    stack.verifier.script = steps(stack.ids("a"), reason=STOP)
    one = (await stack.http.post("/generate", json={"text": ["x"], "sampling_params": {}})).json()
    assert [answer["text"] for answer in one] == ["a"]
    four = (await stack.http.post("/generate", json={"input_ids": [[5], [6, 7]], "sampling_params": {"n": 2}})).json()
    assert [answer["meta_info"]["prompt_tokens"] for answer in four] == [1, 1, 2, 2]
    assert stack.verifier.submitted[0].sampling.max_tokens <= 128


NAMED: list[tuple[dict[str, object], list[str]]] = [
    ({"text": "x", "rid": "mine"}, ["mine"]),
    ({"text": ["x"], "rid": "mine"}, ["mine_0"]),
    ({"text": ["x", "y"], "rid": "mine"}, ["mine_0", "mine_1"]),
    ({"text": ["x", "y"], "rid": ["a", "b"]}, ["a", "b"]),
    ({"text": "x", "rid": "mine", "sampling_params": {"n": 2}}, ["mine_0", "mine_1"]),
    ({"input_ids": [[5], [6]], "rid": ["a", "b"], "sampling_params": {"n": 2}}, ["a_0", "a_1", "b_0", "b_1"]),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_each_item_of_a_list_has_an_id_of_its_own(stack: Stack, stream: bool) -> None:
    async def ids(body: dict[str, object]) -> list[str]:
        answer = await stack.http.post("/generate", json={**body, "stream": stream})
        assert answer.status_code == 200, answer.text
        if stream:
            found = {item.get("index", 0): item["meta_info"]["id"] for item in events(answer.text)}
            return [found[index] for index in sorted(found)]
        items = answer.json()
        return [item["meta_info"]["id"] for item in (items if isinstance(items, list) else [items])]

    for body, wanted in NAMED:
        assert await ids(body) == wanted
    drawn = await ids({"text": ["x", "y", "z"]})
    assert len(set(drawn)) == 3 and all(name.startswith("gen-") for name in drawn)


async def test_generate_logprobs(stack: Stack) -> None:
    async def play(player: Player) -> None:
        entry = common_pb2.TokenLogprobs(token_id=65, logprob=-0.5, rank=1, top_ids=[65], top_logprobs=[-0.5])
        prompt = [common_pb2.TokenLogprobs(token_id=i, logprob=-1.0, rank=1) for i in (6, 7)]
        player.tokens([65], logprobs=[entry], prompt_logprobs=prompt)
        player.finish(LENGTH)

    stack.verifier.script = play
    body = {
        "input_ids": [5, 6, 7],
        "return_logprob": True,
        "top_logprobs_num": 1,
        "logprob_start_len": 0,
        "return_text_in_logprobs": True,
    }
    info = (await stack.http.post("/generate", json=body)).json()["meta_info"]
    name = stack.tokenizer.decode([65])
    assert info["output_token_logprobs"] == [[-0.5, 65, name]]
    assert info["output_top_logprobs"] == [[[-0.5, 65, name]]]
    assert [item[:2] for item in info["input_token_logprobs"]] == [[None, 5], [-1.0, 6], [-1.0, 7]]
    info = (await stack.http.post("/generate", json={**body, "logprob_start_len": 2})).json()["meta_info"]
    assert [item[:2] for item in info["input_token_logprobs"]] == [[-1.0, 7]]


BAD: list[tuple[str, dict[str, object]]] = [
    ("text", {}),
    ("text", {"text": "a", "input_ids": [1]}),
    ("text", {"text": ""}),
    ("text", {"text": []}),
    ("text", {"text": 5}),
    ("input_ids", {"input_ids": []}),
    ("input_ids", {"input_ids": [1, "a"]}),
    ("input_ids", {"input_ids": [10**6]}),
    ("max_new_tokens", {"text": "a", "sampling_params": {"max_new_tokens": 0}}),
    ("ebnf", {"text": "a", "sampling_params": {"ebnf": "root ::= a", "regex": "a"}}),
    ("structural_tag", {"text": "a", "sampling_params": {"structural_tag": "{}"}}),
    ("allowed_token_ids", {"text": "a", "sampling_params": {"allowed_token_ids": []}}),
    ("bad_words", {"text": "a", "sampling_params": {"bad_words": [""]}}),
    ("priority", {"text": "a", "priority": 2**31}),
    ("custom_logit_processor", {"text": "a", "custom_logit_processor": "x"}),
    ("sampling_params", {"text": "a", "sampling_params": [{}]}),
    ("rid", {"text": ["a", "b"], "rid": ["a"]}),
    ("rid", {"text": ["a", "b"], "rid": ["a", "a"]}),
    ("rid", {"text": ["a", "b"], "rid": ["a", "b\n"]}),
    ("rid", {"text": "a", "rid": ["a"]}),
    ("rid", {"text": "a", "rid": 5}),
    ("rid", {"text": ["a"], "rid": [5]}),
    ("n", {"text": "a", "sampling_params": {"n": 10**12}}),
    ("image_data", {"text": "a", "image_data": "x"}),
    ("return_routed_experts", {"text": "a", "return_routed_experts": True}),
    ("logprob_start_len", {"text": "a", "logprob_start_len": -2}),
    ("top_logprobs_num", {"text": "a", "top_logprobs_num": 21}),
]


async def test_generate_names_bad_fields(stack: Stack) -> None:
    for field, body in BAD:
        answer = await stack.http.post("/generate", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), (body, answer.text)
    assert not stack.verifier.submitted


async def test_a_request_id_cannot_write_headers(stack: Stack) -> None:
    answer = await stack.http.post("/generate", json={"text": "a", "rid": "x\r\nevil: 1"})
    assert answer.status_code == 200 and "evil" not in answer.headers
    answer = await stack.http.post("/generate", json={"text": "a", "rid": "mine"})
    assert answer.headers["x-request-id"] == "mine"


async def test_tokenize_and_detokenize(stack: Stack) -> None:
    body = (await stack.http.post("/tokenize", json={"prompt": "hello 日", "return_token_strs": True})).json()
    ids = stack.ids("hello 日")
    assert (body["tokens"], body["count"], body["max_model_len"]) == (ids, len(ids), 128)
    assert len(body["token_strs"]) == len(ids)
    chat = (await stack.http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})).json()
    assert chat["tokens"] == stack.ids("<|user|>user: hi\nassistant: ") and chat["token_strs"] is None
    text = (await stack.http.post("/detokenize", json={"tokens": ids})).json()
    assert text == {"prompt": "hello 日"}
    # Also the text that a chat template put around it.
    for more, expected in (
        ({}, "<|user|>user: hi\nassistant: "),
        ({"skip_special_tokens": True}, "user: hi\nassistant: "),
    ):
        text = (await stack.http.post("/detokenize", json={"tokens": chat["tokens"], **more})).json()
        assert text == {"prompt": expected}
    for tokens in ("x", [1.5], [10**6], [-1], None):
        answer = await stack.http.post("/detokenize", json={"tokens": tokens})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")
    info = (await stack.http.get("/tokenizer_info")).json()
    assert info["eos_token"] == "<|end|>" and "add_generation_prompt" in info["chat_template"]
