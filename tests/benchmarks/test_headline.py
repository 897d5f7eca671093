"""The README's picture shows the committed measurements."""

from __future__ import annotations

from xml.etree import ElementTree

from benchmarks.headline import PICTURE, Panel, draw, panels


def test_the_committed_picture_is_current() -> None:
    assert PICTURE.read_text() == draw(panels()), "run: python -m benchmarks.headline"


def test_bars_are_as_long_as_their_rates() -> None:
    root = ElementTree.fromstring(draw([Panel("machine", 100.0, "drafter", 400.0)]))
    bars = [float(rect.attrib["width"]) for rect in root.findall(".//{*}rect")][1:]
    assert bars[1] == 4 * bars[0]
    assert any("400  (4.0x)" in (text.text or "") for text in root.findall(".//{*}text"))
