"""``foretoken tune``: what it starts, what it refuses, and that ``serve`` reads what it writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from drafter_svc.drafter_spec import parse_spec
from foretoken.bench.client import Address
from foretoken.cli import app
from foretoken.commands.config_file import read_config, write_config
from foretoken.commands.given import Given
from foretoken.commands.options import COMMANDS, ServeOptions, TuneOptions
from foretoken.commands.service_settings import stack_settings
from foretoken.commands.settings_command import SettingsCommand
from foretoken.commands.tuning import config_of, trial_of
from foretoken.errors import ConfigError, ForetokenError
from foretoken.tune import run as tune_run
from foretoken.tune import server
from foretoken.tune.candidates import AUTO, PLAIN, Candidate, ShapeFlags
from foretoken.tune.choice import LimitedCandidate
from foretoken.tune.run import TuneOutcome
from foretoken.tune.tuner import Findings
from tests.support.command_line import DEMO, free_port
from verifier_svc.config import VerifierSettings

SHAPES = ("--shapes", "3-1-4,7-8-32")
# 0: as many nodes as the server chooses.
AUTO_NODES = 0
NGRAM_FLAGS = ("--speculative-ngram-capacity", "4096")
TREE = Candidate("eagle3 7-8-32", ("eagle3",), ShapeFlags(7, 8, 32))
LOOKUP = Candidate("ngram", ("ngram",))


def given(command: str, *words: str) -> Given:
    found = app.commands[command]
    assert isinstance(found, SettingsCommand)
    return found.given(found.make_context(command, list(words)))


def written(path: Path, choice: LimitedCandidate, *words: str) -> Given:
    """Return what ``serve`` reads in the file that is written for a choice."""
    asked = given("tune", *words)
    trial, _ = trial_of(asked, asked.settings(TuneOptions))
    write_config(path, "--write-config", ["comment: one", "two"], config_of(asked, choice, trial))
    return given("serve", "--config", str(path))


def started(path: Path, choice: LimitedCandidate, *words: str) -> Any:
    """Return the settings of the stack that ``serve`` starts with the file.

    They are checked as at a start.
    """
    ports = ("--port", free_port(), "--grpc-port", free_port())
    words = tuple(words) + ports
    return stack_settings(written(path, choice, *words), path.parent)


def test_a_shape_becomes_flags_and_the_only_drafter(tmp_path: Path) -> None:
    stack = started(
        tmp_path / "t.yaml", LimitedCandidate(TREE, 4, 1.0), "demo", *SHAPES, "--threads", "2", *NGRAM_FLAGS
    )
    assert [(spec.name, spec.algorithm) for spec, _ in stack.drafters] == [("eagle3", "EAGLE3")]
    verifier = stack.verifier
    assert (verifier.speculative_num_steps, verifier.speculative_eagle_topk) == (7, 8)
    assert (verifier.speculative_num_draft_tokens, verifier.speculative_max_batch_size) == (32, 4)
    # The user's own flags stay, but for those of a drafter that is gone.
    assert verifier.threads == 2 and verifier.model == DEMO / "target"


def test_the_servers_own_choice_keeps_the_drafters_and_the_bounds_in_which_it_was_measured(tmp_path: Path) -> None:
    stack = started(tmp_path / "t.yaml", LimitedCandidate(AUTO, 0, 1.0), "demo", *SHAPES, *NGRAM_FLAGS)
    assert [spec.name for spec, _ in stack.drafters] == ["eagle3", "ngram"]
    assert stack.drafters[1][1].ngram.capacity == 4096
    assert TreeFlags.of(stack.verifier) == TreeFlags(0, 8, 32)


def test_small_shapes_leave_the_servers_own_choice_its_usual_bounds(tmp_path: Path) -> None:
    """``auto`` is measured as a server without these flags would choose."""
    words = ("demo", "--shapes", "1-1-2,5-2-8")
    stack = started(tmp_path / "t.yaml", LimitedCandidate(AUTO, 0, 1.0), *words)
    assert TreeFlags.of(stack.verifier) == TreeFlags(0, 4, AUTO_NODES)


def test_plain_decode_starts_no_drafter(tmp_path: Path) -> None:
    words = ("demo", "--speculative-num-steps", "3", *NGRAM_FLAGS)
    stack = started(tmp_path / "t.yaml", LimitedCandidate(PLAIN, 0, 1.0), *words)
    assert stack.drafters == [] and TreeFlags.of(stack.verifier) == TreeFlags(0, 4, AUTO_NODES)


def test_a_look_up_drafter_keeps_its_options(tmp_path: Path) -> None:
    words = (str(DEMO / "target"), "--drafter", "name=ngram,algorithm=NGRAM,placement=in-process", *NGRAM_FLAGS)
    stack = started(tmp_path / "t.yaml", LimitedCandidate(LOOKUP, 0, 1.0), *words)
    assert [(spec.name, spec.placement) for spec, _ in stack.drafters] == [("ngram", "in-process")]
    assert stack.drafters[0][1].ngram.capacity == 4096
    # No shape is tried without a model, so the bounds are the usual ones.
    assert TreeFlags.of(stack.verifier) == TreeFlags(0, 4, AUTO_NODES)


def test_drafters_that_draft_together_are_both_there(tmp_path: Path) -> None:
    both = Candidate("eagle3+ngram 3-1-4", ("eagle3", "ngram"), ShapeFlags(3, 1, 4))
    stack = started(tmp_path / "t.yaml", LimitedCandidate(both, 0, 1.0), "demo")
    assert [spec.name for spec, _ in stack.drafters] == ["eagle3", "ngram"]
    assert TreeFlags.of(stack.verifier) == TreeFlags(3, 1, 4)


def test_secrets_are_left_out_and_a_flag_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    written(path, LimitedCandidate(TREE, 0, 1.0), "demo", *SHAPES, "--api-key", "very-secret", "--port", "81")
    assert "very-secret" not in path.read_text() and read_config(path)["port"] == "81"
    words = ("--config", str(path), "--speculative-num-steps", "5", "--port", "82")
    values = given("serve", *words).values
    assert (values["speculative_num_steps"], values["speculative_eagle_topk"], values["port"]) == (5, 8, 82)


def test_a_running_servers_choice_is_its_shape_alone(tmp_path: Path) -> None:
    asked = given("tune", "--url", "http://a:1")
    expected = {"speculative-num-steps": "7", "speculative-eagle-topk": "8", "speculative-num-draft-tokens": "32"}
    assert config_of(asked, LimitedCandidate(TREE, 0, 1.0), None) == expected
    assert config_of(asked, LimitedCandidate(PLAIN, 0, 1.0), None) == {"speculative-algorithm": "NONE"}
    assert config_of(asked, LimitedCandidate(AUTO, 0, 1.0), None) == {}


def test_every_kind_of_value_is_read_as_it_was_written(tmp_path: Path) -> None:
    texts = ["off", "null", "12:30", "a: b", "- x", "# no", " blank ", "it's", 'say "x"', "a\nb", "ü", "", "{}", "1e3"]
    path = tmp_path / "t.yaml"
    values = {f"key{number}": text for number, text in enumerate(texts)}
    write_config(path, "--write-config", ["one: two"], {**values, "list": texts, "flag": True})
    assert read_config(path) == {**values, "list": texts, "flag": "true"}
    # Other readers of YAML agree.
    assert yaml.safe_load(path.read_text()) == {**values, "list": texts, "flag": True}


def test_the_server_gets_the_flags_of_models_and_none_of_the_network() -> None:
    words = ("demo", *SHAPES, "--threads", "2", "--host", "0.0.0.0", "--insecure", "--api-key", "k", "--port", "81")
    asked = given("tune", *words, "--speculative-num-steps", "3", "--log-level", "info")
    trial, notices = trial_of(asked, asked.settings(TuneOptions))
    assert trial.words == [
        *("demo", "--threads", "2", "--speculative-num-draft-tokens", "32", "--speculative-eagle-topk", "8"),
        *("--log-level", "info"),
    ]
    assert notices[-1] == "--speculative-num-steps: tuning finds it, so what is given has no effect"
    assert [(drafter.name, drafter.has_model) for drafter in trial.drafters] == [("eagle3", True), ("ngram", False)]
    # They are a command line of serve.
    assert given("serve", *trial.words).settings(ServeOptions).log_level == "info"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give either MODEL, to start a server for it, or --url of a running server"),
        (("demo", "--url", "http://a:1"), "give either MODEL"),
        (("--url", "http://a:1", "--threads", "2"), "--threads: no effect with --url"),
        (("demo", "--write-config", "/nowhere/t.yaml"), "--write-config: there is no folder /nowhere"),
        (("demo", "--write-config", "t.toml"), "--write-config: expected a name that ends in .yaml, got t.toml"),
        (("demo", "--picture", "/nowhere/t.svg"), "--picture: there is no folder /nowhere"),
        (("demo", "--shapes", "3-1"), "--shapes: expected LEVELS-CHILDREN-NODES such as 3-1-4"),
        (("demo", "--try-drafters", "mtp"), "--try-drafters: there is no drafter mtp; available: eagle3, ngram"),
        (("demo", "--budget", "2"), "--budget: expected at most 1.0, got 2.0"),
        (("demo", "--budget", "0.01"), "--budget: needs at least 30 rounds for 13 candidates, and may use 2"),
        (("demo", "--weights", "1"), "--weights: expected as many numbers as --max-concurrency has"),
        (("demo", "--requests-per-round", "1", "--max-concurrency", "4"), "--requests-per-round: 1 cannot keep 4"),
        (("demo", "--drafter", "name=a"), "drafter a: --drafter"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(
    words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.subprocess, "Popen", lambda *words, **options: pytest.fail("a server was started"))
    result = CliRunner().invoke(app, ["tune", *words])
    assert isinstance(result.exception, ConfigError), result.output
    assert str(result.exception).startswith(message)


def test_a_server_that_does_not_start_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for status, kind in ((2, ConfigError), (1, ForetokenError)):
        program = tmp_path / "program"
        program.write_text(f"#!/bin/sh\nexit {status}\n")
        program.chmod(0o755)
        monkeypatch.setattr(server.sys, "executable", str(program))
        with pytest.raises(kind, match="ended before it was ready"), server.running_server(["demo"]):
            pass


def test_an_interrupted_run_writes_what_it_knows_and_has_status_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def running(words: list[str]) -> Iterator[Address]:
        yield Address("127.0.0.1", 1)

    def run(*words: Any) -> TuneOutcome:
        findings = Findings({1: {PLAIN: [1.0], TREE: [2.0]}}, is_interrupted=True)
        return TuneOutcome(
            "table", ["lines"], findings, LimitedCandidate(TREE, 0, 1.0), {"version": "0", "began_at": "now"}
        )

    monkeypatch.setattr(server, "running_server", running)
    monkeypatch.setattr(server, "attached_drafters", lambda address: {"eagle3": "EAGLE3", "ngram": "NGRAM"})
    monkeypatch.setattr(tune_run, "run", run)
    path = tmp_path / "t.yaml"
    result = CliRunner().invoke(app, ["tune", "demo", "--write-config", str(path)])
    assert result.exit_code == 130, result.output
    assert result.stdout.startswith("table\n\nlines\nserve it with: ")
    values = read_config(path)
    assert values["speculative-num-draft-tokens"] == "32" and parse_spec(values["drafter"][0]).name == "eagle3"


class TreeFlags(tuple[int, int, int]):
    """The three flags of a verifier's trees."""

    def __new__(cls, *numbers: int) -> TreeFlags:
        return super().__new__(cls, numbers)

    @staticmethod
    def of(settings: VerifierSettings) -> TreeFlags:
        return TreeFlags(
            settings.speculative_num_steps, settings.speculative_eagle_topk, settings.speculative_num_draft_tokens
        )


def test_tune_takes_all_flags_of_serve_but_those_of_a_start() -> None:
    from foretoken.commands.options import settings_of_command

    serve = {setting.flag for setting in settings_of_command("serve") if not setting.is_argument}
    tune = {setting.flag for setting in settings_of_command("tune")}
    ray = {"--executor", "--num-verifiers", "--ray-address", "--insecure-links", "--drain-timeout"}
    assert serve - tune == ray | {"--dry-run", "--discovery-interval", "--routing-load-bound", "--verifier-address"}
    assert "tune" not in COMMANDS
