"""Which loads are made in which order, and what a row says; the clients are a recorded trace."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from foretoken.bench.client import Address
from foretoken.bench.load import Clients, CompletedRequest, LoadResult
from foretoken.bench.measures import Bounds
from foretoken.bench.prompts import LoadPrompt
from foretoken.bench.stream import UserStream
from foretoken.bench.sweep import AHEAD, Sweep, SweepPoint, categories
from foretoken.bench.target import BenchTarget, RequestOptions

# Nothing listens there: neither server has figures of its own.
FIRST, SECOND = (BenchTarget(name, Address("127.0.0.1", 1), name, RequestOptions("completions")) for name in ("a", "b"))


def numbered(seed: str) -> Iterator[LoadPrompt]:
    return (LoadPrompt.of_text(f"{seed} {number}") for number in itertools.count())


@dataclass
class Trace:
    """Answers each request as ``answer`` says, and notes what it was asked for."""

    answer: Callable[[dict[str, Any]], CompletedRequest | str]
    loads: list[tuple[list[UserStream], int]] = field(default_factory=list)
    count: int = 2
    # What follows the streams of the last load.
    more: Iterator[UserStream] | None = None

    def drive(
        self,
        address: Address,
        streams: Sequence[UserStream],
        timeout_s: float,
        limit: int,
        on_progress: Any = None,
        duration_s: float = math.inf,
        more: Iterator[UserStream] | None = None,
    ) -> LoadResult:
        self.loads.append((list(streams), limit))
        self.more = more
        found = [self.answer(body) for stream in streams for body in stream.bodies]
        answers = [each for each in found if isinstance(each, CompletedRequest)]
        return LoadResult(answers, 0.5, [each for each in found if isinstance(each, str)])


def one_second(body: dict[str, Any]) -> CompletedRequest:
    return CompletedRequest(10.0, 10.5, 11.5, 20, 0, 11, (), due_at=10.0)


def sweep(trace: Trace, *targets: BenchTarget, **fields: Any) -> Sweep:
    clients = cast("Clients", trace)
    return Sweep(targets=targets, prompts=numbered, clients=clients, **{"points": [SweepPoint(2)]} | fields)


def rows(found: Sweep) -> list[dict[str, Any]]:
    return list(found.rows(lambda name, ended, total: None))


def test_two_servers_get_the_same_prompts_and_change_places() -> None:
    trace = Trace(one_second)
    found = rows(sweep(trace, FIRST, SECOND, points=[SweepPoint(2), SweepPoint(rate=5.0)], rounds=3, num_prompts=4))
    sent = [(streams[0].bodies[0]["model"], streams[0].bodies[0]["prompt"], limit) for streams, limit in trace.loads]
    assert [model for model, _, _ in sent] == list("abbaab") * 2
    assert [limit for _, _, limit in sent] == [2] * 6 + [0] * 6
    for one, other in zip(sent[::2], sent[1::2], strict=True):
        assert one[1] == other[1]
    assert len({prompt for _, prompt, _ in sent}) == 6
    assert [(row["load"], row["round"], row["server"]) for row in found] == [
        (load, number, name) for load in ("2", "5/s") for number in range(3) for name in "ab"
    ]


def test_arrivals_are_random_at_the_wanted_rate_and_equal_for_equal_seeds() -> None:
    def starts_of(point: SweepPoint, seed: str) -> list[float]:
        return list(itertools.islice(point.arrivals(seed), 4000))

    starts = starts_of(SweepPoint(rate=4.0), "a")
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert starts[0] == 0.0 and min(gaps) > 0
    assert sum(gaps) / len(gaps) == pytest.approx(0.25, rel=0.05)
    # Exponential gaps: as many as 1 - 1/e are shorter than the mean.
    assert sum(gap < 0.25 for gap in gaps) / len(gaps) == pytest.approx(0.632, abs=0.03)
    assert starts == starts_of(SweepPoint(rate=4.0), "a") != starts_of(SweepPoint(rate=4.0), "b")
    assert starts_of(SweepPoint(3), "a") == [0.0] * 4000


@pytest.mark.parametrize(("num_prompts", "duration_s"), [(0, 3.0), (7, 3.0), (7, 300.0), (7, math.inf)])
def test_a_duration_bounds_the_arrivals_and_the_number_of_prompts_does_too(num_prompts: int, duration_s: float) -> None:
    trace = Trace(one_second)
    rows(sweep(trace, FIRST, points=[SweepPoint(rate=5.0)], num_prompts=num_prompts, duration_s=duration_s))
    starts = [stream.starts_after for stream in trace.loads[0][0]]
    every = list(itertools.islice(SweepPoint(rate=5.0).arrivals("0 5/s 0"), 100))
    within = [at for at in every if at < duration_s]
    assert 7 < len([at for at in every if at < 3.0]) < 100
    assert trace.more is None and starts == within[: num_prompts or None]


def test_requests_at_once_follow_each_other_until_the_duration_is_over() -> None:
    trace = Trace(one_second)
    rows(sweep(trace, FIRST, points=[SweepPoint(3)], duration_s=10.0))
    (streams, limit) = trace.loads[0]
    assert limit == 3 and len(streams) == 3 * AHEAD and trace.more is not None
    prompts = [stream.bodies[0]["prompt"] for stream in [*streams, *itertools.islice(trace.more, 5)]]
    assert prompts == [f"0 3 0 {number}" for number in range(3 * AHEAD + 5)]
    rows(sweep(trace, FIRST, points=[SweepPoint(3)], duration_s=10.0, num_prompts=5))
    assert len(trace.loads[1][0]) == 5 and trace.more is None


@pytest.mark.parametrize(
    ("point", "wanted", "prompts", "clients"),
    [
        (SweepPoint(1), 0, 32, 1),
        (SweepPoint(32), 0, 128, 1),
        (SweepPoint(33), 7, 7, 2),
        (SweepPoint(rate=5.0), 0, 100, 1),
    ],
)
def test_sizes_that_are_not_given(point: SweepPoint, wanted: int, prompts: int, clients: int) -> None:
    assert (point.num_prompts(wanted), point.num_clients()) == (prompts, clients)
    assert SweepPoint(rate=100.0).num_clients() == 5


def test_failures_are_counted_by_reason_and_left_out_of_the_figures() -> None:
    replies = itertools.cycle([one_second({}), "status 503: full", "cut off", "status 503: full"])
    (row,) = rows(sweep(Trace(lambda body: next(replies)), FIRST, num_prompts=8, bounds=Bounds(ttft_s=0.4)))
    assert (row["num_sent"], row["num_failed"], row["num_requests"]) == (8, 6, 2)
    assert row["failures"] == {"status 503: full": 4, "cut off": 2}
    assert (row["num_tokens"], row["good_share"], row["has_bounds"]) == (22, 0.0, True)
    (row,) = rows(sweep(Trace(lambda body: "cut off"), FIRST, num_prompts=3))
    assert (row["num_sent"], row["num_failed"], row["has_bounds"]) == (3, 3, False) and "tokens_per_s" not in row


def test_a_rate_ends_with_its_requests() -> None:
    trace = Trace(one_second)
    (row,) = rows(sweep(trace, FIRST, points=[SweepPoint(rate=2.0)], num_prompts=5))
    (streams, limit) = trace.loads[0]
    assert limit == 0 and [stream.starts_after for stream in streams] == list(
        itertools.islice(SweepPoint(rate=2.0).arrivals("0 2/s 0"), 5)
    )
    assert (row["load"], row["request_rate"], row["concurrency"]) == ("2/s", 2.0, 0)
    # All were sent at once in this trace, and ended together: 5 x 11 tokens in 1.5 s.
    assert row["tokens_per_s"] == pytest.approx(55 / 1.5) and row["client_late_p99_ms"] == 0


def test_the_warm_up_goes_to_each_server_and_its_failures_are_told() -> None:
    trace = Trace(lambda body: "no" if body["model"] == "b" else one_second(body))
    assert sweep(trace, FIRST, SECOND).warm_up(2) == ["no", "no"]
    assert [len(streams) for streams, _ in trace.loads] == [2, 2]
    assert sweep(Trace(one_second), FIRST).warm_up(0) == []


def test_categories_have_figures_of_their_own() -> None:
    speculation = {"num_spec_steps": 2, "num_accepted_draft_tokens": 4}
    math = CompletedRequest(0.0, 1.0, 3.0, 1, 0, 11, (), "math", speculation=speculation)
    coding = [
        CompletedRequest(0.0, 2.0, 3.0, 1, 0, 11, (), "coding"),
        CompletedRequest(0.0, 4.0, 5.0, 1, 0, 11, (), "coding"),
    ]
    found = categories([math, *coding])
    assert list(found) == ["coding", "math"]
    assert found["coding"] == {
        "num_requests": 2,
        "num_tokens": 22,
        "ttft_p50_ms": pytest.approx(2000),
        "tpot_p50_ms": pytest.approx(100),
        "tokens_per_step": None,
    }
    assert found["math"]["tokens_per_step"] == 3.0 and found["math"]["tpot_p50_ms"] == pytest.approx(200)
    assert categories([one_second({})]) == {}
