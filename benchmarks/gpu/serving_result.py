"""The result file of one workload: rows that are kept one by one, so that a run can resume."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from benchmarks.arms import ARMS

FORMAT = 1
# Rates of arrivals that differ by less are the same.
SAME_RATE = 0.01
Row = dict[str, Any]


class ServingResult:
    """One workload's rows and their file. A row is known by its arm and its point."""

    def __init__(self, folder: Path, workload: str, facts: dict[str, Any]) -> None:
        """Read the rows that the file has. ``facts`` describe this run: benchmarks.gpu.provenance.

        Raises:
            ValueError: the file is not a result of this format.
        """
        self.file = folder / f"serving-{workload}.json"
        self._facts = facts
        self.content: dict[str, Any] = {"format": FORMAT, "workload": workload, **facts, "rows": []}
        if self.file.exists():
            found = json.loads(self.file.read_text(encoding="utf-8"))
            if found.get("format") != FORMAT or found.get("workload") != workload:
                raise ValueError(f"{self.file} is no result of this workload")
            self.content["rows"] = found["rows"]

    @property
    def rows(self) -> list[Row]:
        rows: list[Row] = self.content["rows"]
        return rows

    def has(self, arm: str, point: str, requests_a_stream: int, rate: float) -> bool:
        """Return whether a row of this GPU, and for foretoken of this commit, is there.

        It must have at least ``requests_a_stream``, and the same ``rate`` of arrivals.
        """
        return any(
            row["arm"] == arm
            and row["point"] == point
            and row["gpu"] == self._facts["device"]["gpu"]
            and (ARMS[arm].engine == "vllm" or row["commit"] == self._facts["commit"])
            and row["requests_a_stream"] >= requests_a_stream
            and math.isclose(row["rate"], rate, rel_tol=SAME_RATE)
            for row in self.rows
        )

    def add(self, row: Row) -> None:
        """Keep a row in place of an older one of the same arm and point, and write the file."""
        facts = {"commit": self._facts["commit"], "gpu": self._facts["device"]["gpu"]}
        self.content["rows"] = [
            other for other in self.rows if (other["arm"], other["point"]) != (row["arm"], row["point"])
        ]
        self.content["rows"].append(row | facts | {"began_at": self._facts["began_at"]})
        self.file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.file.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(self.file)
