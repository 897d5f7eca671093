"""The documented ranges of a request's numbers: foretoken.limits must match them."""

from __future__ import annotations

from protos import common_pb2

# By field of SamplingParams: the lowest and highest allowed value, and one beyond each end.
NUMBERS: dict[str, tuple[float, float, float, float]] = {
    "temperature": (0.0, 2.0, -0.01, 2.01),
    "top_p": (0.01, 1.0, 0.0, 1.01),
    "top_k": (-1, 1_000_000, -2, 1_000_001),
    "min_p": (0.0, 1.0, -0.01, 1.01),
    "presence_penalty": (-2.0, 2.0, -2.01, 2.01),
    "frequency_penalty": (-2.0, 2.0, -2.01, 2.01),
    "repetition_penalty": (0.01, 10.0, 0.009, 10.01),
    "seed": (-(2**63), 2**63 - 1, -(2**63) - 1, 2**63),
    "max_tokens": (1, 1_000_000, 0, 1_000_001),
    "min_tokens": (0, 1_000_000, -1, 1_000_001),
    "logprobs": (0, 20, -1, 21),
    "prompt_logprobs": (0, 20, -1, 21),
}


def beyond_on_the_wire() -> list[tuple[str, common_pb2.SamplingParams]]:
    """Return each field with each value beyond its range that protobuf can hold."""
    found = []
    for name, (*_, below, above) in NUMBERS.items():
        for value in (below, above):
            try:
                found.append((name, common_pb2.SamplingParams(**{name: value})))
            except ValueError:
                assert value < 0 or value >= 2**63, "only what the type of the field excludes is left out"
    return found


def at_the_ends_on_the_wire() -> list[common_pb2.SamplingParams]:
    """Return each field at each of its ends, with the fields that it needs."""
    found = []
    for name, (low, high, *_) in NUMBERS.items():
        room = {"max_tokens": 1_000_000} if name == "min_tokens" else {}
        found += [common_pb2.SamplingParams(**room, **{name: value}) for value in (low, high)]
    return found
