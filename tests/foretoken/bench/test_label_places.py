"""Labels of a picture cover neither each other nor points, and stay in their room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foretoken.bench.label_places import Box, along, around, place, text_width

ROOM = Box(0, 0, 400, 300)
POINTS = st.lists(st.tuples(st.floats(5, 395), st.floats(5, 295)), min_size=1, max_size=12)


@given(points=POINTS)
def test_labels_cover_nothing(points: list[tuple[float, float]]) -> None:
    dots = [around(x, y, 4) for x, y in points]
    taken = list(dots)
    for point in points:
        box = place("eagle3", point, 10, ROOM, taken, ())
        if box is not None:
            assert ROOM.holds(box) and not any(map(box.overlaps, taken))
            taken.append(box)


def test_a_label_keeps_off_lines_if_it_can() -> None:
    line = [(100.0, 150.0), (200.0, 50.0)]
    covered = list(along(line))
    box = place("eagle3", line[0], 10, ROOM, [around(100, 150, 4)], covered)
    assert box is not None and not any(map(box.overlaps, covered))
    # Where lines are everywhere, a label still stands beside its point.
    assert place("eagle3", line[0], 10, ROOM, [around(100, 150, 4)], [ROOM]) is not None


def test_there_may_be_no_place() -> None:
    assert place("eagle3", (100.0, 150.0), 10, ROOM, [ROOM], ()) is None
    assert place("x" * 100, (100.0, 150.0), 10, ROOM, [], ()) is None
    assert text_width("x" * 100, 10) > ROOM.right
