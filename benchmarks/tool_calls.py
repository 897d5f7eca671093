"""Check that forced tool calls fit their schemas and equal plain decode's, with every drafter.

    python -m benchmarks.tool_calls [--requests 1000] [--model FOLDER]

The demo model never saw a tool: only the grammar makes its calls right. Each request forces a call
of some function or of a named one, at its own seed and temperature. Every reply must end by itself
with calls whose arguments fit the schema; its calls must be equal with each drafter and without.
The exit status is 1 if one is not.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from benchmarks.stack import running_stack

DEMO = Path(__file__).parents[1] / "models" / "demo"
DRAFTERS = {"ngram": "NGRAM", "eagle2": "EAGLE", "eagle3": "EAGLE3", "standalone": "STANDALONE"}
CHOICES = (*DRAFTERS, "merge", "auto")
NUM_AT_ONCE = 4
# A fixed shape is drafted whether it pays or not. Beside a grammar, on a CPU, it rarely does.
SHAPE = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "8")
PLAIN = "plain"


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    city: str = Field(max_length=16)
    unit: Literal["celsius", "fahrenheit"]
    days: int = Field(ge=1, le=7)


class Note(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    title: str = Field(min_length=1, max_length=12)
    tags: list[Annotated[str, Field(max_length=8)]] = Field(max_length=3)
    done: bool


MODELS: dict[str, type[BaseModel]] = {"get_weather": Weather, "add_note": Note}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": model.model_json_schema()}}
    for name, model in MODELS.items()
]
Calls = list[tuple[str, str]]


@dataclass
class ToolCallOutcome:
    """What one way of drafting came to."""

    num_calls: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    num_accepted: int = 0
    # What was wrong, by request.
    faults: dict[int, str] = field(default_factory=dict)
    calls: dict[int, Calls] = field(default_factory=dict)


def body_of(number: int, choice: str) -> dict[str, Any]:
    """Return one request: its number decides everything but the drafter."""
    named = {"type": "function", "function": {"name": [*MODELS][number // 2 % 2]}}
    return {
        "messages": [{"role": "user", "content": f"Return the weather of place {number}."}],
        "tools": TOOLS,
        "tool_choice": named if number % 2 else "required",
        # Many calls in one reply are long.
        "parallel_tool_calls": number % 40 == 0,
        "seed": number,
        "temperature": number % 5 * 0.3,
        "speculative": {"enabled": False} if choice == PLAIN else {"drafter": choice},
    }


def fault_of(answer: dict[str, Any], number: int) -> tuple[str, Calls]:
    """Return what is wrong with an answer, empty if nothing is, and its calls."""
    (one,) = answer["choices"]
    calls: Calls = [(c["function"]["name"], c["function"]["arguments"]) for c in one["message"].get("tool_calls") or []]
    if one["finish_reason"] != "tool_calls" or not calls or one["message"]["content"] is not None:
        return f"no calls alone: {one}", calls
    for name, arguments in calls:
        try:
            MODELS[name].model_validate_json(arguments)
        except ValidationError as error:
            return f"{arguments}: {error}", calls
    wanted = body_of(number, PLAIN)["tool_choice"]
    if wanted != "required" and [name for name, _ in calls] != [wanted["function"]["name"]]:
        return f"not the named function: {calls}", calls
    return "", calls


async def run(url: str, choice: str, num_requests: int) -> ToolCallOutcome:
    """Send all requests, a few at once."""
    outcome = ToolCallOutcome()
    places = asyncio.Semaphore(NUM_AT_ONCE)

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        async with places:
            response = await client.post("/v1/chat/completions", json=body_of(number, choice))
        response.raise_for_status()
        answer = response.json()
        fault, calls = fault_of(answer, number)
        outcome.calls[number] = calls
        outcome.num_calls += len(calls)
        outcome.num_tokens += answer["usage"]["completion_tokens"]
        outcome.num_accepted += answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
        if fault:
            outcome.faults[number] = fault

    began = time.monotonic()
    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as client:
        await asyncio.gather(*(ask(client, number) for number in range(num_requests)))
    outcome.seconds = time.monotonic() - began
    return outcome


def check(url: str, num_requests: int, choices: Sequence[str]) -> dict[str, ToolCallOutcome]:
    """Return the outcome of plain decode and of each choice of drafters, and print each."""
    outcomes: dict[str, ToolCallOutcome] = {}
    for choice in (PLAIN, *choices):
        outcome = outcomes[choice] = asyncio.run(run(url, choice, num_requests))
        for number, calls in outcome.calls.items():
            if calls != (wanted := outcomes[PLAIN].calls[number]):
                outcome.faults.setdefault(number, f"{calls}, but plain decode: {wanted}")
        right = f"{num_requests - len(outcome.faults)} of {num_requests}"
        figures = (right, outcome.num_calls, outcome.num_tokens, outcome.num_accepted, f"{outcome.seconds:.0f}")
        print(f"| {choice} | {' | '.join(map(str, figures))} |", flush=True)
    return outcomes


def flags_of(drafters: Sequence[str]) -> list[str]:
    """Return the flags that start these drafters of the demo model, with trees of a fixed shape."""
    flags = [*SHAPE]
    for name in drafters:
        model = "" if name == "ngram" else f",model={DEMO / name}"
        flags += ["--drafter", f"name={name},algorithm={DRAFTERS[name]}{model}"]
    return flags


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.tool_calls", description="Check forced tool calls.")
    parser.add_argument("--requests", type=int, default=1000, help="requests for each way of drafting")
    parser.add_argument("--model", type=Path, default=DEMO / "target", help="the target's checkpoint")
    options = parser.parse_args()
    print(
        "| drafter | right | calls | tokens | accepted draft tokens | seconds |\n| --- | --- | --- | --- | --- | --- |"
    )
    with running_stack(options.model, 1, flags_of([*DRAFTERS]), num_drafters=len(DRAFTERS)) as (address, _):
        outcomes = check(f"http://{address.host}:{address.port}", options.requests, CHOICES)
    for choice, outcome in outcomes.items():
        for number, fault in [*outcome.faults.items()][:3]:
            print(f"{choice}, request {number}: {fault}", file=sys.stderr)
    sys.exit(any(outcome.faults for outcome in outcomes.values()))


if __name__ == "__main__":
    main()
