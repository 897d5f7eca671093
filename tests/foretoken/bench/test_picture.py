"""Where the labels of a picture stand."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as xml

import pytest

from foretoken.bench.label_places import Box, around, place
from foretoken.bench.picture import LABEL_SIZE, LEFT, PLOT_WIDTH, Mark, Picture

ROOM = Box(0, 0, 200, 100)


def labels(root: xml.Element) -> list[Box]:
    """Return the boxes of the labels of a picture's points."""
    found = []
    for element in root.findall("{*}text"):
        if element.get("font-size") == str(LABEL_SIZE):
            x, y, half = float(element.attrib["x"]), float(element.attrib["y"]), 3 * len(str(element.text))
            found.append(Box(x - half, y - 8, x + half, y + 2))
    return found


@pytest.mark.parametrize("count", [2, 3, 8])
def test_no_label_covers_another_or_the_legend(count: int) -> None:
    lines = {
        name: [Mark(index, factor * index, f"candidate {name}") for index in range(count)]
        for name, factor in (("first", 10.0), ("second", 10.1))
    }
    places = list(map(str, range(count)))
    root = xml.fromstring(Picture("title", "x", "y", lines, {}, places).svg())
    found = labels(root)
    assert len(found) == 2 * count
    assert not any(one.overlaps(other) for one, other in itertools.combinations(found, 2))
    assert all(box.left >= LEFT - 6 and box.right <= LEFT + PLOT_WIDTH + 0.1 for box in found)


def test_a_long_name_in_the_legend_widens_the_picture() -> None:
    name = "a server with a rather long name, requests at once"
    short, long = (xml.fromstring(Picture("title", "x", "y", {n: [Mark(1, 1, "1")]}, {}).svg()) for n in ("a", name))
    assert int(long.attrib["width"]) > int(short.attrib["width"]) == 820


def test_a_label_stays_off_lines_and_nearest_to_its_own_point_if_it_can() -> None:
    point, other = (100.0, 50.0), (100.0, 30.0)
    box = place("label", point, 10, ROOM, [around(*point, 4)], [Box(0, 0, 200, 48)], [point, other])
    assert box is not None and box.top > 48
    assert place("label", point, 10, ROOM, [ROOM], []) is None
