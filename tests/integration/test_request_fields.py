"""Fields of vLLM and SGLang through the whole stack: the
model must follow, with drafts and without.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.stack import Stack, running

pytestmark = pytest.mark.anyio
PROMPT = "for i in range(10):\n    print(i)\n" * 3


@pytest.fixture(scope="module")
def stack(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(checkpoint, tmp_path_factory.mktemp("fields") / "log") as stack:
        yield stack


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stack.url, timeout=None) as client:
        yield client


async def complete(http: httpx.AsyncClient, **more: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True, **more}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ids_of(answer: dict[str, Any]) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


@pytest.mark.parametrize("temperature", [pytest.param(0.7, marks=pytest.mark.slow), 1.0])
async def test_masks_hold_and_drafts_do_not_change_the_text(http: httpx.AsyncClient, temperature: float) -> None:
    common: dict[str, Any] = {"temperature": temperature, "seed": 5}
    plain = ids_of(await complete(http, **common))
    pairs = [plain[i : i + 2] for i in range(0, len(plain) - 1, 3)]
    texts = [(await http.post("/detokenize", json={"tokens": pair})).json()["prompt"] for pair in pairs]
    # Only texts that the tokenizer splits as the model did.
    banned = []
    for pair, text in zip(pairs, texts, strict=True):
        if (await http.post("/tokenize", json={"prompt": text})).json()["tokens"] == pair and text == text.lstrip():
            banned.append((pair, text))
    assert banned
    masks = [
        {"bad_words": [text for _, text in banned]},
        {"allowed_token_ids": sorted(set(plain))[::2]},
        {"allowed_token_ids": sorted(set(plain)), "bad_words": [text for _, text in banned]},
    ]
    for mask in masks:
        with_drafts = await complete(http, **common, **mask)
        without = await complete(http, **common, **mask, speculative={"enabled": False})
        assert ids_of(with_drafts) == ids_of(without)
        assert "allowed_token_ids" not in mask or set(ids_of(without)) <= set(mask["allowed_token_ids"])
        if "bad_words" in mask:
            got = ids_of(without)
            assert not any(got[i : i + 2] == pair for pair, _ in banned for i in range(len(got)))
    assert ids_of(await complete(http, **common, **masks[0])) != plain


@pytest.mark.parametrize("field", ["guided_grammar", "structured_outputs", "ebnf"])
async def test_an_output_follows_an_ebnf_grammar(http: httpx.AsyncClient, field: str) -> None:
    text = 'root ::= "(" item ("," item){2} ")"\nitem ::= [a-c]{2} | "x"\n'
    if field == "ebnf":
        body = {"text": PROMPT, "sampling_params": {"ebnf": text, "max_new_tokens": 60, "sampling_seed": 3}}
        found = (await http.post("/generate", json=body)).json()["text"]
    else:
        grammar = {"guided_grammar": text} if field == "guided_grammar" else {"structured_outputs": {"grammar": text}}
        found = (await complete(http, seed=3, **grammar))["choices"][0]["text"]
    parts = found.removeprefix("(").removesuffix(")").split(",")
    assert len(parts) == 3 and all(part == "x" or (len(part) == 2 and set(part) <= set("abc")) for part in parts)


async def test_a_grammar_that_cannot_be_used_names_the_clients_field(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json={"prompt": "a", "guided_grammar": "rule ::= ("})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "guided_grammar")


async def test_the_seed_of_an_answer_gives_it_again(http: httpx.AsyncClient) -> None:
    first = await complete(http, temperature=1.0)
    again = await complete(http, temperature=1.0, seed=first["seed"])
    other = await complete(http, temperature=1.0)
    assert ids_of(again) == ids_of(first) and other["seed"] != first["seed"]


async def test_masks_that_leave_nothing_are_a_400(http: httpx.AsyncClient) -> None:
    body = {"prompt": "a", "max_tokens": 9, "min_tokens": 4, "allowed_token_ids": [0]}
    answer = await http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "allowed_token_ids")


async def test_prompt_logprobs_are_those_of_an_echo(http: httpx.AsyncClient) -> None:
    both = await complete(http, echo=True, logprobs=2, prompt_logprobs=1, max_tokens=1)
    (choice,) = both["choices"]
    echoed = choice["logprobs"]["token_logprobs"][: len(choice["prompt_token_ids"])]
    own = [
        position and position[str(token_id)]["logprob"]
        for token_id, position in zip(choice["prompt_token_ids"], choice["prompt_logprobs"], strict=True)
    ]
    assert own == echoed and own[0] is None and len(own) > 9
