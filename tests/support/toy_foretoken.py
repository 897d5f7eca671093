"""``foretoken`` with one more row in its table of algorithms.

python -m tests.support.toy_foretoken COMMAND ...
"""

from __future__ import annotations

from drafter_svc.algorithms import ALGORITHMS, Algorithm
from foretoken.cli import main

if __name__ == "__main__":
    ALGORITHMS["TOY"] = Algorithm(
        "TOY",
        "tests.support.toy_drafter:make_drafter",
        aliases=("PLAYTHING",),
        options="tests.support.toy_drafter:ToySettings",
    )
    main()
