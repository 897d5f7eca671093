"""What one generation is asked to do: prompts, sampling, and what its reader wants back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from foretoken.sampling import SamplingParams, SpeculationOptions
from foretoken.tracing import TraceContext


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and their text if the client sent text or wants it back."""

    ids: tuple[int, ...]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Everything that decides the output. Check it against the limits before you make a Generation.

    ``sampling.max_tokens`` may exceed the context: each output gets what its prompt leaves.
    """

    id: str
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    speculation: SpeculationOptions
    n: int = 1
    # Whether the seed was drawn: then each further prompt gets one of its own.
    draws_seeds: bool = False
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    # Special tokens that are text all the same: they mark tool calls or reasoning.
    kept_special_ids: frozenset[int] = frozenset()
    cache_salt: str | None = None
    timeout_ms: int | None = None
    # The parent of its spans.
    trace: TraceContext | None = None
    # The client's name for the field that set the grammar; empty: the name in common.proto.
    grammar_field: str = ""
    # Which tool's schema begins on a line of the grammar; None: the answer's.
    schema_tools: Mapping[int, str | None] = field(default_factory=dict)
    # The output that the client expects: a draft.
    prediction_ids: tuple[int, ...] = ()
    # Lower numbers start first.
    priority: int = 0
    # Whether the answer shows the trees that its steps verify.
    returns_trees: bool = False
    # Whether the answer names the drafter of each token and node.
    names_drafters: bool = False
    # The outputs' own ids, with which a client can abort each; empty: they have none.
    output_ids: tuple[str, ...] = ()

    @property
    def num_outputs(self) -> int:
        return len(self.prompts) * self.n

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prompts)

    def max_tokens_after(self, prompt: Prompt, max_model_len: int) -> int:
        """Return the most tokens of one output after ``prompt``."""
        return min(self.sampling.max_tokens, max_model_len - len(prompt.ids))

    def max_output_tokens(self, max_model_len: int) -> int:
        """Return the most tokens of all outputs together."""
        return self.n * sum(self.max_tokens_after(prompt, max_model_len) for prompt in self.prompts)
