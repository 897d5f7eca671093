"""What no service may do with bytes that others wrote: SECURITY.md promises it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("foretoken", "gateway", "verifier_svc", "drafter_svc", "kernels")
BANNED_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "multiprocessing", "shelve"}
BANNED_CALLS = {"eval", "exec", "torch.save", "yaml.load", "json_format.Parse", "json_format.ParseDict"}
# A separate process with limits, for the error that it translates; and a load's
# clients, which are its own children.
ALLOWED = {
    ("foretoken/commands/convert_worker.py", "import pickle"),
    ("foretoken/bench/load.py", "import multiprocessing"),
    ("foretoken/bench/load.py", "from multiprocessing.connection"),
}


def faults(source: str) -> Iterator[str]:
    """Yield what is banned in a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (f"import {name.name}" for name in node.names if name.name.partition(".")[0] in BANNED_MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in BANNED_MODULES:
            yield f"from {node.module}"
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            options = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if called in BANNED_CALLS:
                yield called
            if called == "torch.load" and options.get("weights_only") != "True":
                yield "torch.load without weights_only"
            if called.endswith(("np.load", "numpy.load")) and options.get("allow_pickle", "False") != "False":
                yield "np.load with pickles"
            if options.get("trust_remote_code", "False") != "False":
                yield "trust_remote_code"
            if options.get("shell", "False") != "False":
                yield "a shell"


def test_services_load_no_pickle_run_no_text_and_no_remote_code() -> None:
    found = {
        (str(file.relative_to(ROOT)), fault)
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        for fault in faults(file.read_text())
    }
    # Training saves and resumes its own state.
    training = {fault for fault in found if fault[0].startswith("foretoken/train/")}
    assert {fault for _, fault in training} <= {"torch.save"}
    assert found - training == ALLOWED


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import multiprocessing.shared_memory",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "np.load(f, allow_pickle=True)",
        "AutoModel.from_pretrained(f, trust_remote_code=flag)",
        "subprocess.run(words, shell=True)",
        "eval(text)",
    ],
)
def test_what_is_banned_is_found(source: str) -> None:
    assert list(faults(source))
