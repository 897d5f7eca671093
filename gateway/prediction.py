"""What a client predicts of the output (OpenAI's Predicted Outputs): its field, and which of its tokens came true."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import Field

from foretoken import limits
from foretoken.errors import InvalidRequestError
from gateway.fields import Fields

# Places of a pair on either side of the cursor: a text may hold one thousands of times.
_LOOKED_AT = 16


class PredictionFields(Fields):
    """OpenAI's ``prediction``: text that the output is expected to be, or to be much like. Never changes the text."""

    type: Literal["content"]
    content: Any = Field(description="A string, or a list of parts of type text.")


def parts_text(content: object, field: str) -> str:
    """The text of an OpenAI content, perhaps joined from parts. Raises InvalidRequestError naming ``field``."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    limits.check_count(field, len(parts), limits.MAX_CONTENT_PARTS)
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError(f"{field} must be a string or a list of parts of type text", field=field)
    return "".join(str(text) for text in texts)


class PairPlaces:
    """Where a prediction holds a pair of tokens; built by the first lookup."""

    def __init__(self, prediction: Sequence[int]) -> None:
        self._prediction = prediction
        self._behind: dict[tuple[int, int], list[int]] | None = None

    def behind(self, first: int, second: int) -> Sequence[int]:
        """Return the places after each such pair, in order."""
        if self._behind is None:
            self._behind = {}
            for place, pair in enumerate(itertools.pairwise(self._prediction), 2):
                self._behind.setdefault(pair, []).append(place)
        return self._behind.get((first, second), ())


class PredictionMatch:
    """Counts the tokens of a prediction that came true in one output, whoever drafted them.

    The output goes on at a cursor in the prediction, at first at its beginning. A token that is the cursor's came true,
    and the cursor passes it. Any other token is looked up together with the one before it: where the prediction holds
    the pair, the cursor goes behind the place nearest to it, but not to where all has come true before; where it does
    not, the token is taken for a replaced one, and the cursor passes one token, unless the token before failed too. A
    token that came true counts once.
    """

    def __init__(self, prediction: Sequence[int], places: PairPlaces | None = None) -> None:
        """``places``: those of this prediction, shared by all outputs that it is expected of."""
        self._prediction = prediction
        self._places = places or PairPlaces(prediction)
        self._cursor = 0
        self._last: int | None = None
        self._was_true = True
        self._came_true: set[int] = set()

    @property
    def num_accepted(self) -> int:
        """Tokens of the prediction that came true so far."""
        return len(self._came_true)

    @property
    def num_rejected(self) -> int:
        """All others of it."""
        return len(self._prediction) - len(self._came_true)

    def feed(self, token_ids: Iterable[int]) -> None:
        """The output's next tokens."""
        prediction = self._prediction
        for token_id in token_ids:
            if self._cursor < len(prediction) and prediction[self._cursor] == token_id:
                self._came_true.add(self._cursor)
                self._cursor += 1
                self._was_true = True
            else:
                self._cursor = self._place_behind(token_id)
                self._was_true = False
            self._last = token_id

    def _place_behind(self, token_id: int) -> int:
        """Where the prediction goes on after a token that it did not hold at the cursor."""
        places = self._places.behind(self._last, token_id) if self._last is not None else ()
        after = bisect.bisect_left(places, self._cursor)
        near = [
            place for place in places[max(after - _LOOKED_AT, 0) : after + _LOOKED_AT] if place not in self._came_true
        ]
        if near:
            return min(near, key=lambda place: (abs(place - self._cursor), -place))
        return self._cursor + self._was_true
