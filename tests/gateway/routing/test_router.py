"""Which verifier a request goes to, and why: small fleets that a reader can follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from gateway.routing.fleet import Fleet
from gateway.routing.prefix import prefix_keys
from gateway.routing.router import Decision, Router, RoutingReason


def fleet_of(num_verifiers: int, *, rows: int = 16) -> Fleet:
    fleet = Fleet()
    for index in range(num_verifiers):
        number = fleet.add(f"10.0.0.{index}:50061")
        fleet.open(number, "model")
        fleet.update(number, load=0, rows=rows)
    return fleet


def prompt(name: int, num_tokens: int = 100) -> list[int]:
    return np.random.default_rng(name).integers(0, 50_000, num_tokens).tolist()


def route(router: Router, tokens: Sequence[int], salt: str | None = None) -> Decision:
    decision = router.route(prefix_keys(tokens, salt))
    assert decision is not None
    return decision


def test_without_a_verifier_there_is_no_decision_and_of_one_no_choice() -> None:
    fleet = Fleet()
    router = Router(fleet)
    assert router.route(prefix_keys(prompt(1), None)) is None
    number = fleet.add("a:1")
    assert router.route(prefix_keys(prompt(1), None)) is None
    fleet.open(number, "model")
    assert router.route(prefix_keys(prompt(1), None)) == Decision(number, RoutingReason.ONLY)
    fleet.close(number)
    assert router.route(prefix_keys(prompt(1), None)) is None


def test_a_conversation_stays_and_other_gateways_agree() -> None:
    first, second = Router(fleet_of(8)), Router(fleet_of(8))
    for name in range(50):
        tokens = prompt(name, 2000)
        homes = {route(router, tokens[:length]) for router in (first, second) for length in (80, 200, 900, 2000)}
        assert len(homes) == 1
        assert homes.pop().reason is RoutingReason.AFFINITY


def test_prefixes_and_tenants_are_spread_over_all() -> None:
    router = Router(fleet_of(8))
    by_prefix = Counter(route(router, prompt(name)).number for name in range(800))
    assert sorted(by_prefix) == list(range(8)) and max(by_prefix.values()) < 150
    by_tenant = {route(router, prompt(1), str(salt)).number for salt in range(100)}
    assert by_tenant == set(range(8))


def test_when_a_verifier_goes_only_its_prefixes_move_and_they_come_back() -> None:
    fleet = fleet_of(8)
    router = Router(fleet)
    names = range(200)
    before = {name: route(router, prompt(name)).number for name in names}
    fleet.close(3)
    during = {name: route(router, prompt(name)).number for name in names}
    assert all(during[name] == before[name] for name in names if before[name] != 3)
    moved = Counter(during[name] for name in names if before[name] == 3)
    # They do not all fall on one neighbour.
    assert 3 not in moved and len(moved) >= 5
    fleet.open(3, "model")
    assert {name: route(router, prompt(name)).number for name in names} == before


def test_above_its_bound_the_next_in_the_prefix_order_takes_it() -> None:
    fleet = fleet_of(4)
    home = route(Router(fleet), prompt(1)).number
    for number in range(4):
        fleet.update(number, load=10, rows=16)
    # 46 with the new one, times 1.25, over 4: at most 14.4.
    fleet.update(home, load=13, rows=16)
    fleet.remember(1.0)
    assert route(Router(fleet), prompt(1)) == Decision(home, RoutingReason.AFFINITY)
    fleet.update(home, load=15, rows=16)
    # A moment's load is chance, the usual one is not.
    assert route(Router(fleet), prompt(1)) == Decision(home, RoutingReason.AFFINITY)
    fleet.remember(1.0)
    spread = route(Router(fleet), prompt(1))
    assert spread.reason is RoutingReason.SPREAD and spread.number != home
    # Any gateway chooses the same one: it is the first without the home.
    fleet.close(home)
    assert route(Router(fleet), prompt(1)).number == spread.number


def test_a_burst_that_is_no_chance_spreads_at_once_and_a_lull_ends_it() -> None:
    fleet = fleet_of(4)
    home = route(Router(fleet), prompt(1)).number
    for number in range(4):
        fleet.update(number, load=10, rows=16)
    fleet.remember(1.0)
    # (30 + 23 + 1) / 4 = 13.5; the 16 rows, and twice its root, are 23.3.
    fleet.update(home, load=23, rows=16)
    assert route(Router(fleet), prompt(1)) == Decision(home, RoutingReason.AFFINITY)
    fleet.update(home, load=26, rows=16)
    assert route(Router(fleet), prompt(1)).reason is RoutingReason.SPREAD
    fleet.remember(1.0)
    fleet.update(home, load=9, rows=16)
    assert route(Router(fleet), prompt(1)) == Decision(home, RoutingReason.AFFINITY)


def test_a_prefix_waits_for_no_verifier_while_another_is_free() -> None:
    """512 streams on two H200s of 256 rows each: the first
    token took 980 ms where 256 on one took 179.
    """
    fleet = fleet_of(2, rows=256)
    home = route(Router(fleet), prompt(1)).number
    fleet.update(home, load=250, rows=256)
    fleet.update(1 - home, load=204, rows=256)
    fleet.remember(1.0)
    assert route(Router(fleet), prompt(1)) == Decision(home, RoutingReason.AFFINITY)
    # Within 1.25 times the mean, which is 240 with the new one.
    fleet.update(home, load=275, rows=256)
    fleet.remember(1.0)
    assert route(Router(fleet), prompt(1)) == Decision(1 - home, RoutingReason.SPREAD)
    # Where all sequences wait, it may as well be there.
    fleet.update(1 - home, load=260, rows=256)
    fleet.remember(1.0)
    assert route(Router(fleet), prompt(1)) == Decision(home, RoutingReason.AFFINITY)


def test_a_wide_bound_keeps_to_the_prefix() -> None:
    fleet = fleet_of(4)
    home = route(Router(fleet), prompt(1)).number
    fleet.update(home, load=10, rows=16)
    fleet.remember(1.0)
    assert route(Router(fleet), prompt(1)).reason is RoutingReason.SPREAD
    assert route(Router(fleet, load_bound=100), prompt(1)) == Decision(home, RoutingReason.AFFINITY)


def test_a_nearly_idle_verifier_is_never_above_its_bound() -> None:
    fleet = fleet_of(4, rows=256)
    home = route(Router(fleet), prompt(1)).number
    # Far above the mean, but below a 64th of its rows.
    fleet.update(home, load=3, rows=256)
    fleet.remember(1.0)
    assert route(Router(fleet), prompt(1)) == Decision(home, RoutingReason.AFFINITY)
    fleet.update(home, load=8, rows=256)
    fleet.remember(1.0)
    assert route(Router(fleet), prompt(1)).reason is RoutingReason.SPREAD


def test_a_verifier_with_more_rows_may_have_more_load() -> None:
    fleet = fleet_of(2)
    home = route(Router(fleet), prompt(1)).number
    fleet.update(1 - home, load=10, rows=16)
    fleet.update(home, load=30, rows=64)
    fleet.remember(1.0)
    assert route(Router(fleet), prompt(1)) == Decision(home, RoutingReason.AFFINITY)
    fleet.update(home, load=30, rows=16)
    assert route(Router(fleet), prompt(1)) == Decision(1 - home, RoutingReason.SPREAD)


def test_a_full_cache_or_queue_sends_requests_elsewhere() -> None:
    fleet = fleet_of(2)
    home = route(Router(fleet), prompt(1)).number
    fleet.update(home, load=0, fill=0.97)
    assert route(Router(fleet), prompt(1)) == Decision(1 - home, RoutingReason.SPREAD)
    fleet.update(1 - home, load=1, fill=0.99)
    # Both will preempt: the one with less to do.
    assert route(Router(fleet), prompt(1)) == Decision(home, RoutingReason.LOAD)
    fleet.update(home, load=0, room=1)
    assert Router(fleet).route(prefix_keys(prompt(1), None), num_new=2) == Decision(1 - home, RoutingReason.ONLY)
    assert Router(fleet).route(prefix_keys(prompt(1), None), num_new=1) == Decision(home, RoutingReason.AFFINITY)


def test_only_verifiers_of_the_model_take_its_sequences() -> None:
    fleet = fleet_of(4)
    router = Router(fleet)
    fleet.open(2, "other")
    keys = prompt(1)
    assert router.route(prefix_keys(keys, None), model="other") == Decision(2, RoutingReason.ONLY)
    assert router.route(prefix_keys(keys, None), model="third") is None
    chosen = {router.route(prefix_keys(prompt(name), None), model="model") for name in range(100)}
    assert {decision.number for decision in chosen if decision is not None} == {0, 1, 3}


def test_a_short_prompt_goes_where_the_least_load_is_and_ties_are_spread() -> None:
    fleet = fleet_of(4)
    router = Router(fleet)
    ties = Counter(route(router, [1, 2, 3]).number for _ in range(200))
    assert len(ties) == 4 and max(ties.values()) < 100
    for number in (0, 1, 3):
        fleet.update(number, load=2)
    assert route(router, [1, 2, 3]) == Decision(2, RoutingReason.LOAD)


def serve(router: Router, fleet: Fleet, prompts: Sequence[Sequence[int]], running: int) -> list[Decision]:
    """Route prompts one by one. The latest ``running`` of them run at the same time."""
    decisions: list[Decision] = []
    for tokens in prompts:
        decision = route(router, tokens)
        fleet.load[decision.number] += 1
        decisions.append(decision)
        if len(decisions) > running:
            fleet.load[decisions[-running - 1].number] -= 1
    return decisions


def test_a_hot_prefix_spreads_and_its_conversations_stay() -> None:
    fleet = fleet_of(16, rows=32)
    router = Router(fleet)
    system = prompt(0, 512)
    conversations = [system + prompt(name, 300) for name in range(1, 65)]
    # 40% of the requests have the system prompt, in 64 conversations that go on in turn.
    prompts = [
        conversations[index // 5 * 2 % 64 + index % 5] if index % 5 < 2 else prompt(10_000 + index, 600)
        for index in range(6000)
    ]
    decisions = serve(router, fleet, prompts, running=160)[3000:]
    hot: dict[int, Counter[int]] = {}
    for index, decision in enumerate(decisions, start=3000):
        if index % 5 < 2:
            hot.setdefault(index // 5 * 2 % 64 + index % 5, Counter())[decision.number] += 1
    used = set().union(*hot.values())
    assert len(used) > 8
    kept = sum(max(counter.values()) for counter in hot.values()) / sum(counter.total() for counter in hot.values())
    assert kept > 0.8
    load = Counter(decision.number for decision in decisions)
    assert max(load.values()) / (len(decisions) / 16) < 1.25


def test_a_prefix_of_little_load_stays_on_one_verifier_however_popular() -> None:
    """One user alone makes all requests: nothing is gained by a second verifier."""
    fleet = fleet_of(8)
    router = Router(fleet)
    tokens = prompt(1, 4000)
    decisions = serve(router, fleet, [tokens[: 100 + 10 * turn] for turn in range(300)], running=1)
    assert len(set(decisions)) == 1


def test_one_prompt_alone_fills_all_verifiers_under_load() -> None:
    fleet = fleet_of(4)
    decisions = serve(Router(fleet), fleet, [prompt(1)] * 400, running=64)
    load = Counter(decision.number for decision in decisions[200:])
    assert max(load.values()) - min(load.values()) <= 6
    assert {decision.reason for decision in decisions[200:]} == {RoutingReason.SPREAD}


@pytest.mark.parametrize("num_verifiers", [1, 2, 7, 33])
def test_verifiers_may_come_and_go_between_requests(num_verifiers: int) -> None:
    """Numbers are reused and sets of popular prefixes are
    made anew: a decision is always an open one.
    """
    random = np.random.default_rng(5)
    fleet = fleet_of(num_verifiers)
    router = Router(fleet)
    numbers = list(range(num_verifiers))
    for step in range(1500):
        if step % 10 == 0 and len(numbers) > 1:
            fleet.remove(numbers.pop(int(random.integers(len(numbers)))))
        if step % 15 == 0:
            number = fleet.add(f"new-{step}:1")
            assert number not in numbers
            fleet.open(number, "model")
            numbers.append(number)
        for number in numbers:
            fleet.update(number, load=int(random.integers(0, 30)))
        tokens = prompt(int(random.integers(3)), int(random.integers(10, 300)))
        assert route(router, tokens).number in numbers
