"""Test which classes the check of class sizes counts: `.ci/class_sizes.py`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci/class_sizes.py"
FIELDS = "".join(f"    field_{number}: int\n" for number in range(21))


@pytest.mark.parametrize(
    ("head", "is_reported"),
    [
        ("@dataclass\nclass State:", True),
        ("@dataclass(slots=True)\nclass State:", True),
        ("@dataclass\nclass State:  # large: one state", False),
        ("@dataclass(frozen=True, slots=True)\nclass Record:", False),
        ("class Record(NamedTuple):", False),
        ("class Answer(BaseModel):", False),
    ],
)
def test_the_fields_of_a_dataclass_count_unless_it_is_frozen(head: str, is_reported: bool, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("class_sizes", SCRIPT)
    assert spec is not None and spec.loader is not None
    class_sizes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(class_sizes)
    source = tmp_path / "source.py"
    source.write_text(f"{head}\n{FIELDS}")

    assert bool(class_sizes.too_large(source)) == is_reported
