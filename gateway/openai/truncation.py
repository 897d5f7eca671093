"""Drop the oldest turns of a conversation that leaves no room for an answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from foretoken.errors import ContextLengthError
from gateway.generation_request import Prompt
from gateway.openai.request import ChatFields, ChatMessage

# Room for the answer if the request names none, or more: this part of the context.
ROOM_PART = 4


async def newest_turns(
    fields: ChatFields, prompt_of: Callable[[ChatFields], Awaitable[Prompt]], max_model_len: int
) -> Prompt:
    """Return the prompt of a chat without its oldest turns; as few are dropped as the answer needs.

    A turn begins with a user's message. System messages at the start and the last turn stay. Raises
    ContextLengthError if the context cannot hold these.
    """
    wanted = fields.max_completion_tokens or fields.max_tokens or max_model_len
    most = max_model_len - min(wanted, max_model_len // ROOM_PART)
    num_system, starts = _turn_starts(fields.messages)

    async def prompt_from(start: int) -> Prompt:
        kept = [*fields.messages[:num_system], *fields.messages[start:]]
        return await prompt_of(fields.model_copy(update={"messages": kept}))

    best: Prompt | None = None
    # The first prompt that is short enough lies in starts[low:high].
    low, high = 0, len(starts)
    while low < high:
        # Most conversations fit as a whole.
        middle = 0 if high == len(starts) and low == 0 else (low + high) // 2
        try:
            prompt = await prompt_from(starts[middle])
        except ContextLengthError:
            low = middle + 1
            continue
        if len(prompt.ids) <= most:
            best, high = prompt, middle
        else:
            low = middle + 1
    return best or await prompt_from(starts[-1])


def _turn_starts(messages: list[ChatMessage]) -> tuple[int, list[int]]:
    """Return the number of system messages at the start, and where turns begin after them."""
    num_system = 0
    while num_system < len(messages) - 1 and messages[num_system].role in ("system", "developer"):
        num_system += 1
    later = [number for number in range(num_system + 1, len(messages)) if messages[number].role == "user"]
    return num_system, [num_system, *later]
