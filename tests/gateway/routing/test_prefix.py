"""Keys of prefixes: alike in every process, apart for
tenants, and the same as a conversation grows.
"""

from __future__ import annotations

from gateway.routing.prefix import prefix_keys, prefix_lengths


def test_prefixes_are_whole_blocks_without_the_final_token() -> None:
    assert list(prefix_lengths(0)) == list(prefix_lengths(16)) == []
    assert list(prefix_lengths(17)) == [16]
    assert list(prefix_lengths(100)) == [16, 32, 48, 64, 96]
    assert list(prefix_lengths(97)) == [16, 32, 48, 64, 96]
    assert list(prefix_lengths(500)) == [16, 32, 48, 64, 96, 128, 192, 256, 384, 496]


def test_keys_are_the_same_in_all_gateways() -> None:
    """Literal values: another gateway may run another Python, or another version of this one."""
    assert list(prefix_keys(range(33), None)) == [868980050004886284, 12519686276573009294]


def test_a_longer_prompt_keeps_the_keys_of_its_beginning() -> None:
    turn = list(prefix_keys(range(200), "a"))
    next_turn = list(prefix_keys(range(1000), "a"))
    # The last key of a turn is for all of it; the others are for lengths that both have.
    assert next_turn[: len(turn) - 1] == turn[:-1]
    changed = [*range(199), 7]
    assert list(prefix_keys(changed, "a"))[:-1] == turn[:-1]
    assert not set(prefix_keys([9, *range(1, 200)], "a")) & set(turn)


def test_tenants_share_no_key() -> None:
    keys = [set(prefix_keys(range(100), salt)) for salt in (None, "", "a", "b")]
    assert len(set.union(*keys)) == sum(map(len, keys))
