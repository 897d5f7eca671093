"""A single step on the device takes its results from its own pass."""

from __future__ import annotations

from pathlib import Path

import torch

from foretoken.models.backend import Backend
from foretoken.models.device_sizes import PassSizes
from foretoken.resident import ResidentLayout, ResidentMemory, StreamOrder
from foretoken.sampling import SamplingParams, SpeculationOptions
from tests.support.tiny_checkpoint import save_llama
from verifier_svc.messages import SequenceKey, Submit
from verifier_svc.model.device_runner import DeviceRunner
from verifier_svc.overlap_step import ResidentStep
from verifier_svc.sampling.device_walker import DeviceWalker
from verifier_svc.scheduling.block_manager import BlockTable
from verifier_svc.scheduling.resident_seat import Seat
from verifier_svc.scheduling.sequence import Sequence

VOCAB, HIDDEN, BLOCK = 40, 32, 4


def decoding(token: int) -> Sequence:
    """Return a sequence whose only token is its root, in block 0."""
    options = SpeculationOptions()
    submit = Submit(SequenceKey(1, "r", 0), 0, (token,), (), SamplingParams(temperature=0.0), options, None, None)
    sequence = Sequence(submit, max_model_len=64, eos_ids=frozenset(), token_limit=VOCAB, now=0.0)
    sequence.table = BlockTable(b"", [0])
    sequence.slot = sequence.generation = 0
    return sequence


def test_hidden_states_are_those_of_the_pass_also_when_its_buffer_has_grown(tmp_path: Path, device: str) -> None:
    """A drafter that wants more states comes and goes; the first one's buffer has changed."""
    backend = Backend("gpu", torch.device(device))
    folder = save_llama(tmp_path / "target", vocab_size=VOCAB, hidden_size=HIDDEN)
    runner = DeviceRunner(folder, backend=backend, sizes=PassSizes(4, 4, 1, 8), block_size=BLOCK, num_blocks=2)
    walker = DeviceWalker(
        vocab_size=VOCAB,
        token_limit=VOCAB,
        max_slots=1,
        max_rows=4,
        max_nodes=2,
        device=backend.device,
        graphs=True,
    )
    layout = ResidentLayout(seats=1, tokens=2, nodes=2, hidden_width=HIDDEN, hidden_dtype=runner.dtype)
    memory = ResidentMemory.over(torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device), layout)
    step = ResidentStep(runner, walker, memory, StreamOrder(), max_seats=1, simulated=None, graphs=True)
    # Hidden state 0 is the token's embedding.
    embedding = runner.weights.embedding
    for token in (7, 9):
        step.begin([Seat(decoding(token), 1, None, 1)], (0,), step.number)
        step.launch(is_drafted=False)
        step.receive()
        assert torch.equal(memory.hidden[0], embedding[token]), token
        runner.resident_pass((0, 1, 2), 1, 1, 1, 1)
