"""Replay the log of a controller: ``python3 -m benchmarks.replay_controller LOG``.

It prints a line for each change of the shape, with the figures behind it, and then the number of
decisions that differ from the log. The exit code is 1 if one differs: the code has changed, or the
log is not whole.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from verifier_svc.drafters.request import Shape
from verifier_svc.speculation.controller_log import read
from verifier_svc.speculation.controller_replay import replay


def main() -> int:
    parser = argparse.ArgumentParser(description="Replay the log of a controller with the code of this clone.")
    parser.add_argument("log", type=Path)
    with parser.parse_args().log.open() as file:
        former: Shape | None = None
        steps: Counter[Shape] = Counter()
        num_others = 0
        for number, decision in enumerate(replay(read(file)), start=1):
            steps[decision.replayed] += 1
            num_others += decision.replayed != decision.logged
            if decision.replayed != former:
                former = decision.replayed
                figures = decision.controller.explain()
                print(
                    f"step {number}, batch {decision.batch}: {figures['shape']} ({figures['reason']}), "
                    f"{figures['tokens_per_second']:.0f} tokens/s, plain {figures['plain_tokens_per_second']:.0f}"
                )
    for shape, count in steps.most_common():
        print(f"{shape.name}: {count} steps")
    print(f"{num_others} of {steps.total()} decisions are others than logged")
    return int(num_others > 0)


if __name__ == "__main__":
    raise SystemExit(main())
