"""Draw the pictures of docs/steps.md: ``make docs``, or ``python docs/site/site_pictures.py``.

``--record URL`` first asks a server of the demo model for a step's draft tree and keeps it beside
the pictures, as draft-tree.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

IMAGES = Path(__file__).parents[1] / "images"
RECORD = IMAGES / "draft-tree.json"
TEXT, GREY, LINE = "#1f2933", "#6b7785", "#c5ccd3"
BLUE, GREEN, AMBER = "#1d4ed8", "#15803d", "#b45309"
PALE = {BLUE: "#e3ebfd", GREEN: "#dcf3e4", AMBER: "#fdf0d9", GREY: "#eef1f4"}
FONT = 'font-family="system-ui, sans-serif"'
MONO = 'font-family="ui-monospace, monospace"'

PROMPT = "def read_json(path):\n    with open(path"


class Picture:
    """An SVG under construction; lengths are in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            f' {FONT} font-size="14" role="img">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            f'<path d="M0 0 8 4 0 8z" fill="{TEXT}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        ]

    def text(self, x: float, y: float, words: str, *, anchor: str = "start", fill: str = TEXT, more: str = "") -> None:
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}" {more}>{escape(words)}</text>'.replace(
                " >", ">"
            )
        )

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{PALE[colour]}"'
            f' stroke="{colour}"/>'
        )

    def line(self, start: tuple[float, float], end: tuple[float, float], *, colour: str = LINE, more: str = "") -> None:
        self._parts.append(
            f'<line x1="{start[0]:g}" y1="{start[1]:g}" x2="{end[0]:g}" y2="{end[1]:g}" stroke="{colour}" {more}/>'
        )

    def arrow(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        self.line(start, end, colour=TEXT, more='stroke-width="1.5" marker-end="url(#tip)"')

    def svg(self) -> str:
        return "\n".join([*self._parts, "</svg>"]) + "\n"


# One request.
LANES = {"client": 90, "gateway": 305, "verifier": 550, "drafter": 795}
ROW = 46


class Message(NamedTuple):
    """An arrow between two services."""

    sender: str
    receiver: str
    words: str


class Work(NamedTuple):
    """What a service does by itself."""

    service: str
    words: str
    colour: str


REQUEST: Sequence[Message | Work] = (
    Message("client", "gateway", "text"),
    Work("gateway", "template, tokenizer, limits", GREY),
    Message("gateway", "verifier", "token ids, sampling, seed"),
    Work("verifier", "prefill what no cache has", BLUE),
    Message("verifier", "drafter", "new tokens, hidden states"),
    Work("drafter", "guess: grow a tree", AMBER),
    Message("drafter", "verifier", "a tree of guesses"),
    Work("verifier", "one pass over all nodes", BLUE),
    Work("verifier", "sample, then walk; commit", GREEN),
    Message("verifier", "gateway", "the step's tokens"),
    Work("gateway", "stop strings, text", GREY),
    Message("gateway", "client", "one chunk a step"),
)
# The first and the last of the above that each step repeats.
REPEATED = (4, 11)


def request() -> str:
    """Draw the way of one request through the services."""
    top = 64
    height = top + ROW * len(REQUEST) + 20
    picture = Picture(920, height, "One request: client, gateway, verifier and drafter")
    first, last = (top + ROW * index for index in (REPEATED[0], REPEATED[1] + 1))
    picture.box(10, first - 6, 900, last - first + 4, GREY)
    picture.text(24, first + 14, "each step", fill=GREY, more='font-weight="600"')
    for name, x in LANES.items():
        picture.line((x, 50), (x, height - 14), more='stroke-dasharray="4 4"')
        picture.box(x - 60, 14, 120, 34, BLUE)
        picture.text(x, 36, name, anchor="middle", more='font-weight="600"')
    for index, part in enumerate(REQUEST):
        y = top + ROW * index + ROW / 2
        if isinstance(part, Work):
            x = LANES[part.service]
            picture.box(x - 100, y - 14, 200, 28, part.colour)
            picture.text(x, y + 5, part.words, anchor="middle")
        else:
            start, end = LANES[part.sender], LANES[part.receiver]
            inset = 4 if end > start else -4
            picture.arrow((start + inset, y + 6), (end - inset, y + 6))
            picture.text((start + end) / 2, y - 2, part.words, anchor="middle")
    return picture.svg()


# A recorded tree.
class Tree(NamedTuple):
    """A draft tree as ``return_draft_tree`` gives it."""

    texts: list[str]
    parents: list[int]
    accepted: set[int]
    added: str

    def children(self, node: int) -> list[int]:
        return [index for index, parent in enumerate(self.parents) if parent == node]

    def depth(self, node: int) -> int:
        return 0 if self.parents[node] < 0 else 1 + self.depth(self.parents[node])


def read_tree(found: dict[str, Any]) -> Tree:
    return Tree(found["token_texts"], found["parents"], {0, *found["accepted"]}, found["added"])


def shown(text: str) -> str:
    """Return a token's text with visible white space."""
    return text.replace(" ", "\N{MIDDLE DOT}").replace("\n", "\\n") or "(nothing)"


def lanes_of(tree: Tree) -> dict[int, float]:
    """Return each node's lane: leaves one below the other, a parent beside its first child."""
    lanes: dict[int, float] = {}
    used = 0

    def place(node: int) -> float:
        nonlocal used
        below = sorted(tree.children(node), key=lambda child: child not in tree.accepted)
        if not below:
            used += 1
            lanes[node] = used - 1
        else:
            # All children get a lane.
            first, *_ = [place(child) for child in below]
            lanes[node] = first
        return lanes[node]

    place(0)
    return lanes


def draft_tree(tree: Tree) -> str:
    """Draw a step's tree with the path that the target's own samples take."""
    across, down, left, top, box = 128, 40, 24, 84, 96
    lanes = lanes_of(tree)
    deepest = max(tree.depth(node) for node in lanes)
    end = max(tree.accepted, key=tree.depth)
    width = left + across * (max(deepest, tree.depth(end) + 1) + 1)
    height = int(top + down * (max(lanes.values()) + 1) + 54)
    picture = Picture(width, height, "One step: a draft tree, and the path of the target's samples through it")
    num_drafted, num_accepted = len(tree.parents) - 1, len(tree.accepted) - 1
    picture.text(left, 30, f"{num_drafted} tokens drafted, one pass of the target", more='font-weight="600"')
    picture.text(
        left, 52, f"{num_accepted} accepted, and one that the target adds: {num_accepted + 1} tokens in one step"
    )

    def corner(node: int) -> tuple[float, float]:
        return left + across * tree.depth(node), top + down * lanes[node]

    for node, parent in enumerate(tree.parents):
        if parent >= 0:
            (x, y), (px, py) = corner(node), corner(parent)
            taken = node in tree.accepted
            more = f'stroke-width="{2.5 if taken else 1.2}"'
            picture.line((px + box, py + 14), (x, y + 14), colour=GREEN if taken else LINE, more=more)
    x, y = corner(end)
    # A drafted child of the last accepted node may stand where the added token goes.
    free = y - down if any(corner(node) == (x + across, y) for node in lanes) else y
    picture.line((x + box, y + 14), (x + across, free + 14), colour=BLUE, more='stroke-width="2.5"')
    tokens = [(corner(node), tree.texts[node], GREEN if node in tree.accepted else GREY) for node in lanes]
    for at, words, colour in [*tokens, ((x + across, free), tree.added, BLUE)]:
        picture.box(*at, box, 28, colour)
        picture.text(at[0] + box / 2, at[1] + 19, shown(words)[:12], anchor="middle", more=f'{MONO} font-size="13"')
    y = height - 18
    for x, colour, words in (
        (left, GREEN, "accepted"),
        (left + 120, BLUE, "added by the target"),
        (350, GREY, "not taken"),
    ):
        picture.box(x, y - 12, 16, 14, colour)
        picture.text(x + 24, y, words)
    return picture.svg()


# Two timelines.
class Span(NamedTuple):
    """Work from one time to another, in any unit; no colour: waiting."""

    start: float
    end: float
    words: str
    colour: str = ""


TIMELINES: dict[str, dict[str, Sequence[Span]]] = {
    "Ordinary steps: the host reads a step before it starts the next (on a CPU, all)": {
        "host": (
            Span(0, 1.2, "plan", GREY),
            Span(4.6, 6, "walk, commit", GREEN),
            Span(7.6, 8.8, "plan", GREY),
        ),
        "target": (Span(1.2, 4.6, "step n: all nodes", BLUE), Span(8.8, 12, "step n+1", BLUE)),
        "drafter": (Span(6, 7.6, "draft n+1", AMBER),),
    },
    "Overlapped steps: the GPU does not wait for the host": {
        "host": (
            Span(0, 1, "plan", GREY),
            Span(1, 3, "launch n+1", GREY),
            Span(3, 4.4, "waits for n"),
            Span(4.4, 5.8, "read n", GREEN),
            Span(5.8, 6.8, "plan", GREY),
            Span(6.8, 8.8, "launch n+2", GREY),
            Span(8.8, 9.6, "waits"),
            Span(9.6, 11, "read n+1", GREEN),
        ),
        "target": (
            Span(0, 4.2, "step n: all nodes, sample, walk", BLUE),
            Span(5.4, 9.4, "step n+1, with prompts", BLUE),
            Span(10.6, 12, "step n+2", BLUE),
        ),
        "drafter": (
            Span(0.2, 4.2, "waits for step n"),
            Span(4.2, 5.4, "draft n+1", AMBER),
            Span(5.6, 9.4, "waits for step n+1"),
            Span(9.4, 10.6, "draft n+2", AMBER),
        ),
    },
}


def timelines() -> str:
    """Draw ordinary and overlapped steps over time. Lengths are not to scale."""
    left, unit, lane = 96, 66, 40
    picture = Picture(920, 396, "Ordinary and overlapped steps over time")
    y = 34
    for title, lanes in TIMELINES.items():
        picture.text(20, y, title, more='font-weight="600"')
        for name, spans in lanes.items():
            y += lane
            picture.text(left - 12, y, name, anchor="end", fill=GREY)
            picture.line((left, y + 14), (900, y + 14))
            for span in spans:
                x, width = left + unit * span.start, unit * (span.end - span.start)
                if span.colour:
                    picture.box(x, y - 18, width, 28, span.colour)
                picture.text(
                    x + width / 2,
                    y + 1,
                    span.words,
                    anchor="middle",
                    fill=TEXT if span.colour else GREY,
                    more='font-size="13"',
                )
        y += 64
    picture.text(900, y - 34, "time, not to scale", anchor="end", fill=GREY, more='font-size="13"')
    return picture.svg()


def pictures() -> dict[str, str]:
    """Return each picture by its file's name."""
    return {
        "request.svg": request(),
        "draft-tree.svg": draft_tree(read_tree(json.loads(RECORD.read_text(encoding="utf-8")))),
        "step-times.svg": timelines(),
    }


def recorded(url: str) -> dict[str, Any]:
    """Return the widest tree of a greedy completion, with the token that the target added to it."""
    import httpx

    body = {"prompt": PROMPT, "max_tokens": 96, "temperature": 0, "stream": True, "return_draft_tree": True}
    body |= {"return_token_sources": True, "speculative": {"drafter": "eagle3"}}
    found: list[dict[str, Any]] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=None, trust_env=False) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"] or [{}]
                tree = choice.get("draft_tree")
                if tree and len(choice["token_texts"]) == len(tree["accepted"]) + 1:
                    found.append(tree | {"added": choice["token_texts"][-1]})
    return max(found, key=_interest)


def _interest(tree: dict[str, Any]) -> tuple[bool, int, int]:
    """Return a rank that prefers partly accepted trees, then different tokens, then branches."""
    parents: Iterable[int] = tree["parents"]
    branches = len(tree["parents"]) - len(set(parents))
    return len(tree["accepted"]) in (3, 4), len(set(tree["token_texts"])), branches


def main() -> None:
    """Write all pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", metavar="URL", help="a server of the demo model, to record a tree of")
    options = parser.parse_args()
    if options.record:
        RECORD.write_text(json.dumps(recorded(options.record), indent=1) + "\n", encoding="utf-8")
    for name, text in pictures().items():
        (IMAGES / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
