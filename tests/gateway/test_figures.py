"""The figures in responses, and the one log line of each request."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.results import SpeculationStats
from gateway.config import GatewaySettings
from gateway.figures import accepted_per_step
from gateway.tokenizer import Tokenizer
from tests.gateway.conftest import Stack, run_stack
from tests.gateway.scripted_verifier import LENGTH, Player

URL = "/v1/completions"


def test_formulas_by_hand() -> None:
    stats = SpeculationStats(
        num_decode_steps=10, num_spec_steps=4, num_draft_tokens=16, num_accepted_tokens=6, num_decode_tokens=16
    )
    assert stats.mean_acceptance_length == 1 + 6 / 4
    assert stats.draft_acceptance_rate == 6 / 16
    assert stats.mean_tokens_per_step == 16 / 10
    nothing = SpeculationStats()
    assert (nothing.mean_acceptance_length, nothing.draft_acceptance_rate, nothing.mean_tokens_per_step) == (
        1.0,
        0.0,
        1.0,
    )


@given(st.lists(st.integers(0, 5), max_size=20))
def test_sources_tell_what_each_step_accepted(accepted: list[int]) -> None:
    prefill = [0]
    sources = prefill + [source for count in accepted for source in [*[1] * count, 0]]
    assert accepted_per_step(sources) == accepted
    assert accepted_per_step([*sources, 2, 2]) == [*accepted, 2]


@pytest.mark.anyio
async def test_detail_of_figures_is_the_operators_choice(
    settings: GatewaySettings, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async def play(player: Player) -> None:
        player.tokens([65])
        player.tokens([65, 66, 67])
        player.finish(LENGTH)

    async def answer(detail: Literal["none", "summary", "detailed"]) -> dict[str, object]:
        chosen = settings.model_copy(update={"speculative_metrics": detail})
        body: dict[str, object] = {}
        async for stack in run_stack(chosen, tokenizer, tmp_path / "v.sock"):
            stack.verifier.script = play
            body = (await stack.http.post(URL, json={"prompt": "a"})).json()
        return body

    assert "metrics" not in await answer("none")
    detailed = (await answer("detailed"))["metrics"]
    assert isinstance(detailed, dict)
    assert detailed["speculative_decoding"]["accepted_tokens_per_step"] == [2]


@pytest.mark.anyio
async def test_one_log_line_a_request_without_its_text(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stack.verifier.script = play_secret
    headers = {"x-request-id": "mine", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    body = (await stack.http.post(URL, json={"prompt": "def secret"}, headers=headers)).json()
    (record,) = [record for record in caplog.records if record.getMessage() == "request"]
    fields = vars(record)
    assert (fields["request_id"], fields["client_request_id"]) == (body["id"], "mine")
    assert (fields["api"], fields["outcome"], fields["finish_reasons"]) == (URL, "ok", ["length"])
    assert (fields["prompt_tokens"], fields["completion_tokens"]) == (len(stack.ids("def secret")), 1)
    assert not any("secret" in str(value) for record in caplog.records for value in vars(record).values())
    assert stack.verifier.submitted[0].traceparent == headers["traceparent"]

    refused = await stack.http.post(URL, json={"prompt": "a", "temperature": 9})
    assert refused.status_code == 400
    (record,) = [record for record in caplog.records if record.getMessage() == "request refused"]
    assert (vars(record)["outcome"], vars(record)["field"]) == ("invalid_argument", "temperature")


async def play_secret(player: Player) -> None:
    player.tokens([65])
    player.finish(LENGTH)
