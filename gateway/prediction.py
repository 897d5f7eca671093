"""Read OpenAI's Predicted Outputs, and count which predicted tokens came true."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import Field

from foretoken import limits
from foretoken.errors import InvalidRequestError
from gateway.fields import Fields

# Places considered on either side of the cursor: a text may hold a pair thousands of times.
_LOOKED_AT = 16


class PredictionFields(Fields):
    """OpenAI's ``prediction``: the text that the client expects. It never changes the output."""

    type: Literal["content"]
    content: Any = Field(description="A string, or a list of parts of type text.")


def parts_text(content: object, field: str) -> str:
    """Return the text of an OpenAI content, joined from its parts. Raises InvalidRequestError."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    limits.check_count(field, len(parts), limits.MAX_CONTENT_PARTS)
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError(f"{field} must be a string or a list of parts of type text", field=field)
    return "".join(str(text) for text in texts)


class PairPlaces:
    """Finds the places of a pair of tokens in a prediction; the first lookup builds the index."""

    def __init__(self, prediction: Sequence[int]) -> None:
        self._prediction = prediction
        self._after: dict[tuple[int, int], list[int]] | None = None

    def after(self, first: int, second: int) -> Sequence[int]:
        """Return the places after each such pair, in order."""
        if self._after is None:
            self._after = {}
            for place, pair in enumerate(itertools.pairwise(self._prediction), 2):
                self._after.setdefault(pair, []).append(place)
        return self._after.get((first, second), ())


class PredictionMatch:
    """Counts the tokens of a prediction that came true in one output, whoever drafted them.

    A cursor in the prediction, first at its start, marks where the output continues:

    - If the next token is the token at the cursor, it came true, and the cursor passes it.
    - Otherwise the token is looked up together with the token before it. If the prediction holds
      the pair, the cursor moves after the nearest one, but not to a place that came true before.
    - If not, the token counts as a replacement, and the cursor passes one token, unless the token
      before failed too.

    A token that came true counts once.
    """

    def __init__(self, prediction: Sequence[int], places: PairPlaces | None = None) -> None:
        """``places``: the prediction's index, which all outputs of a request share."""
        self._prediction = prediction
        self._places = places or PairPlaces(prediction)
        self._cursor = 0
        self._last: int | None = None
        self._was_true = True
        self._came_true: set[int] = set()

    @property
    def num_accepted(self) -> int:
        """Predicted tokens that came true so far."""
        return len(self._came_true)

    @property
    def num_rejected(self) -> int:
        """Predicted tokens that did not come true so far."""
        return len(self._prediction) - len(self._came_true)

    def feed(self, token_ids: Iterable[int]) -> list[bool]:
        """Match the output's next tokens; return for each whether it was predicted."""
        prediction = self._prediction
        matches = []
        for token_id in token_ids:
            if self._cursor < len(prediction) and prediction[self._cursor] == token_id:
                self._came_true.add(self._cursor)
                self._cursor += 1
                self._was_true = True
            else:
                self._cursor = self._place_after(token_id)
                self._was_true = False
            self._last = token_id
            matches.append(self._was_true)
        return matches

    def _place_after(self, token_id: int) -> int:
        """Return the cursor after a token that was not the cursor's."""
        places = self._places.after(self._last, token_id) if self._last is not None else ()
        after = bisect.bisect_left(places, self._cursor)
        near = [
            place for place in places[max(after - _LOOKED_AT, 0) : after + _LOOKED_AT] if place not in self._came_true
        ]
        if near:
            return min(near, key=lambda place: (abs(place - self._cursor), -place))
        return self._cursor + self._was_true
