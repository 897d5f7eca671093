"""References for the served figures. Each is a process that answers one prompt at a time.

    python -m benchmarks.reference (transformers | engine) MODEL --threads N

``transformers`` is ``generate`` with its cache, greedy, float32. ``engine`` is the verifier's
engine without services, gRPC or drafters. A request is one line of JSON on stdin, the answer one
line on stdout. A waiting process uses no CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from benchmarks.figures import Timing

KINDS = ("transformers", "engine")


class ReferenceFailedError(Exception):
    """A reference process ended or sent something invalid."""


class Generator(Protocol):
    """Decodes one prompt greedily and ignores end-of-sequence tokens."""

    def generate(self, prompt_ids: Sequence[int], num_tokens: int) -> tuple[list[int], list[float]]:
        """Return the output tokens and the time of each (perf_counter seconds)."""
        ...


class Reference:
    """The parent's end of one reference process."""

    def __init__(self, requests: IO[str], answers: IO[str]) -> None:
        self._requests = requests
        self._answers = answers

    def generate(self, prompt_ids: Sequence[int], num_tokens: int) -> tuple[list[int], Timing]:
        """Return output tokens and times. Raises ReferenceFailedError if the process ended."""
        try:
            self._requests.write(json.dumps({"prompt_ids": list(prompt_ids), "num_tokens": num_tokens}) + "\n")
            self._requests.flush()
        except BrokenPipeError:
            raise ReferenceFailedError("a reference process ended; its message is above") from None
        answer = self._read()
        return answer["token_ids"], Timing(len(answer["token_ids"]), answer["first_token_s"], answer["decode_s"])

    def wait_ready(self) -> None:
        """Wait until the model is loaded."""
        self._read()

    def _read(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise ReferenceFailedError("a reference process ended; its message is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def running_reference(kind: str, model: Path, threads: int) -> Iterator[Reference]:
    """Start a reference process, and yield it when its model is loaded."""
    command = [sys.executable, "-m", "benchmarks.reference", kind, str(model), "--threads", str(threads)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            reference = Reference(child.stdin, child.stdout)
            reference.wait_ready()
            yield reference
        finally:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()


class TransformersGenerator:
    """``AutoModelForCausalLM.generate`` in float32. A streamer records the time of each token."""

    def __init__(self, model: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        # Go on after an end-of-sequence token, as requests with ignore_eos do.
        self._model.generation_config.eos_token_id = None

    def generate(self, prompt_ids: Sequence[int], num_tokens: int) -> tuple[list[int], list[float]]:
        streamer = _TokenTimes()
        ids = self._torch.tensor([list(prompt_ids)])
        with self._torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                do_sample=False,
                use_cache=True,
                max_new_tokens=num_tokens,
                pad_token_id=0,
                streamer=streamer,
            )
        return streamer.token_ids, streamer.times


class _TokenTimes:
    """A streamer for ``generate``. Its first call gets the prompt."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.times: list[float] = []
        self._saw_prompt = False

    def put(self, value: Any) -> None:
        if self._saw_prompt:
            self.times.append(time.perf_counter())
            self.token_ids.extend(value.reshape(-1).tolist())
        self._saw_prompt = True

    def end(self) -> None:
        """Do nothing: no token is held back."""


class EngineGenerator:
    """The verifier's engine, stepped by this thread. A token's time is the end of its step."""

    def __init__(self, model: Path, threads: int) -> None:
        from verifier_svc.assembly import build
        from verifier_svc.config import VerifierSettings
        from verifier_svc.outbox import Outbox
        from verifier_svc.server import spare_collections

        settings = VerifierSettings(model=model, served_model_names=("engine",), address="unix:/none", threads=threads)
        self._engine = build(settings, progress=_no_progress).engine
        self._outbox = Outbox(wake=_nobody_waits)
        self._session = self._engine.open_session(self._outbox)
        self._num_requests = 0
        # As a server does: one full collection takes as long as a hundred steps.
        spare_collections()

    def generate(self, prompt_ids: Sequence[int], num_tokens: int) -> tuple[list[int], list[float]]:
        from verifier_svc.messages import FinishedEvent, TokensEvent

        self._engine.send(self._submission(prompt_ids, num_tokens))
        token_ids: list[int] = []
        times: list[float] = []
        while True:
            self._engine.run_step()
            now = time.perf_counter()
            for event in self._outbox.take():
                match event:
                    case TokensEvent():
                        token_ids.extend(event.token_ids)
                        times.extend([now] * len(event.token_ids))
                    case FinishedEvent():
                        return token_ids, times
                    case _:
                        raise RuntimeError(f"the engine refused a request: {event}")

    def _submission(self, prompt_ids: Sequence[int], num_tokens: int) -> Any:
        """Return a greedy submission without drafts. Its tenant is new, so nothing is cached."""
        from foretoken.sampling import SamplingParams, SpeculationOptions
        from verifier_svc.messages import SequenceKey, Submit

        self._num_requests += 1
        name = f"engine-{self._num_requests}"
        return Submit(
            key=SequenceKey(self._session, name, 0),
            attempt=0,
            prompt_ids=tuple(prompt_ids),
            output_ids=(),
            sampling=SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True),
            speculation=SpeculationOptions(enabled=False),
            cache_salt=name,
            deadline=None,
        )


def _no_progress(done: int, total: int, what: str) -> None:
    """Print nothing: the parent prints its own progress."""


def _nobody_waits() -> None:
    """Do nothing: the thread that fills the outbox also reads it after every step."""


def serve(generator: Generator, requests: IO[str], answers: IO[str]) -> None:
    """Answer requests until the input ends."""
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in requests:
        request = json.loads(line)
        began = time.perf_counter()
        token_ids, times = generator.generate(request["prompt_ids"], request["num_tokens"])
        answer = {"token_ids": token_ids, "first_token_s": times[0] - began, "decode_s": times[-1] - times[0]}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.reference")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    kinds: dict[str, type[TransformersGenerator] | type[EngineGenerator]] = {
        "transformers": TransformersGenerator,
        "engine": EngineGenerator,
    }
    # Output of libraries must not appear between the answers.
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        serve(kinds[options.kind](options.model, options.threads), sys.stdin, answers)


if __name__ == "__main__":
    main()
