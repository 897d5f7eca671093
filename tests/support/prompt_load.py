"""A closed load of long prompts on the synthetic machine: who waits, who decodes, what a step takes.

Every client sends its next request when the last one ends. Prompts are computed in the steps, as
many tokens as the limit of a step leaves. So the batch is no given number: it follows from what the
controller chooses.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from tests.support.synthetic_machine import Machine
from verifier_svc.drafters.request import NO_DRAFT, Shape
from verifier_svc.scheduling.prefill_budget import PrefillBudget
from verifier_svc.speculation.controller import Controller

# Seconds of a step beside the rest of it: the first one in another shape.
CHANGE_SHARE = 0.3


@dataclass(slots=True)
class PromptLoad:
    """
    Attributes:
        prompt, output: tokens of each request.
        requests: of each client.
        tokens: that a row yields a step at most, as with --simulate-accept-length.
        context_us: of a sequence for each 1,000 tokens of its context.
        limit_s: of a step.
    """

    clients: int
    prompt: int
    output: int
    requests: int
    tokens: int
    context_us: float
    limit_s: float = 0.06
    noise: float = 0.03
    shapes: list[Shape] = field(default_factory=list)

    def speed(self, machine: Machine, controller: Controller, seed: int) -> float:
        """Run the load to its end; return its tokens a second."""
        rng = np.random.default_rng(seed)
        token_s = 1e-6 * machine.prompt_us
        budget = PrefillBudget(2048, limit_s=self.limit_s, token_s=token_s, smallest_s=machine.verify_s(1))
        left = [self.requests] * self.clients
        # Clients whose prompts are computed, and how far; output tokens of those that decode.
        waiting: deque[int] = deque(range(self.clients))
        computed, written = [0] * self.clients, dict[int, int]()
        seconds, former, result = 0.0, NO_DRAFT, None
        while waiting or written:
            batch = len(written)
            shape = controller.choose(batch + len(waiting))
            if result is not None:
                controller.observe_step(*result[:3], num_prompt_tokens=result[3])
                if result[0].depth:
                    controller.observe_walk(result[0], self._yield(result[0]) - 1, result[0].depth, result[1])
            step_s = controller.step_s(shape, batch) if batch else 0.0
            num_prompt_tokens = self._compute(waiting, computed, budget.tokens(step_s))
            contexts = sum(self.prompt + count for count in written.values())
            own_s = machine.step_s(shape, batch) + 1e-9 * self.context_us * contexts if batch else 0.0
            change_s = CHANGE_SHARE * own_s if shape != former else 0.0
            taken_s = (own_s + num_prompt_tokens * token_s) * math.exp(self.noise * rng.standard_normal()) + change_s
            if num_prompt_tokens:
                budget.observe(num_prompt_tokens, taken_s, step_s, has_joined=batch > 0)
            result = (shape, batch, taken_s, num_prompt_tokens) if batch else None
            if batch:
                self.shapes.append(shape)
            seconds, former = seconds + taken_s, shape
            self._write(written, waiting, computed, left, self._yield(shape))
        return self.clients * self.requests * self.output / seconds

    def _yield(self, shape: Shape) -> int:
        return min(self.tokens, shape.depth + 1, shape.rows)

    def _compute(self, waiting: deque[int], computed: list[int], room: int) -> int:
        """Compute prompts, the oldest first; return how many tokens."""
        done = 0
        for client in waiting:
            count = min(self.prompt - computed[client], room - done)
            computed[client] += count
            done += count
        return done

    def _write(
        self, written: dict[int, int], waiting: deque[int], computed: list[int], left: list[int], count: int
    ) -> None:
        """Let all rows of a step write, and requests end and begin."""
        for client in list(written):
            written[client] += count
            if written[client] >= self.output:
                del written[client]
                left[client] -= 1
                if left[client]:
                    computed[client] = 0
                    waiting.append(client)
        while waiting and computed[waiting[0]] >= self.prompt:
            written[waiting.popleft()] = 0
