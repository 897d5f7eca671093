"""``foretoken top`` beside a loaded stack: it prints what
``/metrics`` says, and what clients got.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.stack import ENVIRONMENT, Stack, running, wait_until

pytestmark = pytest.mark.slow

DEMO = Path(__file__).parents[2] / "models" / "demo"
DRAFTERS = {"eagle3": f"algorithm=EAGLE3,model={DEMO / 'eagle3'}", "ngram": "algorithm=NGRAM"}
# Always drafts, however busy the machine is.
SHAPE = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
NUM_REQUESTS = 8
# The second look lasts as long as the load: on a busy machine longer
# than `top` waits for an answer.
PATIENT_FORETOKEN = """
from foretoken.cli import main
from foretoken.commands import gateway_reader

gateway_reader.READ_TIMEOUT_S = None
main()
"""
PROMPT = "for i in range(10):\n    print(i)\n" * 4


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("top")
    key = folder / "key"
    key.write_text("an operator's own key")
    drafters = [word for name, spec in DRAFTERS.items() for word in ("--drafter", f"name={name},{spec}")]
    flags = ("--served-model-name", "demo", "--admin-api-key-file", str(key), *SHAPE)
    # Each request is counted by one of two processes.
    with running(DEMO / "target", folder / "log", *drafters, *flags, "--gateway-workers", "2") as stack:
        wait_until(lambda: attached(stack) == DRAFTERS.keys(), stack)
        yield stack


def get(url: str, **more: Any) -> httpx.Response:
    return httpx.get(url, timeout=None, trust_env=False, **more)


def attached(stack: Stack) -> set[str]:
    drafters = get(f"{stack.url}/ready").json()["verifiers"][0]["drafters"]
    return {drafter["name"] for drafter in drafters if drafter["state"] == "attached"}


def ask(stack: Stack, number: int) -> int:
    """Send a request; return the tokens of its output. Each drafter gets half of the requests."""
    body = {"prompt": PROMPT, "max_tokens": 40 + number, "temperature": 0, "ignore_eos": True}
    body |= {"speculative": {"drafter": list(DRAFTERS)[number % 2]}}
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=None, trust_env=False).raise_for_status()
    return int(answer.json()["usage"]["completion_tokens"])


class Between:
    """Stands between ``foretoken top`` and a stack, loads it
    between two looks, and keeps what it showed.
    """

    def __init__(self, stack: Stack) -> None:
        # The texts of /metrics.
        self.seen: list[str] = []
        self.num_tokens = 0
        self._stack = stack

    def answer(self, path: str, key: str) -> httpx.Response:
        if path == "/metrics" and self.seen:
            with ThreadPoolExecutor(NUM_REQUESTS) as pool:
                self.num_tokens = sum(pool.map(lambda number: ask(self._stack, number), range(NUM_REQUESTS)))
        answer = get(f"{self._stack.url}{path}", headers={"authorization": key})
        if path == "/metrics":
            # On a busy machine a late worker shows old figures, a late verifier none.
            while not self._shows_all(answer.text):
                answer = get(f"{self._stack.url}{path}", headers={"authorization": key})
            self.seen.append(answer.text)
        return answer

    def _shows_all(self, text: str) -> bool:
        """Return whether the verifier's figures are in these
        metrics, and all requests that were sent.
        """
        if not self.seen:
            return "foretoken_engine_generated_tokens_total{" in text
        expected = {"request_success_total": NUM_REQUESTS, "engine_generated_tokens_total": self.num_tokens}
        return all(summed(text, name) - summed(self.seen[0], name) >= least for name, least in expected.items())

    def rise(self, name: str, *labels: str) -> float:
        """Return how far a metric's samples rose between the
        two looks; ``labels`` as they are written.
        """
        before, after = self.seen
        return summed(after, name, *labels) - summed(before, name, *labels)


def summed(text: str, name: str, *labels: str) -> float:
    lines = [line for line in text.splitlines() if line.startswith(f"foretoken_{name}{{")]
    return sum(float(line.split()[-1]) for line in lines if all(label in line for label in labels))


@contextmanager
def serving(between: Between) -> Iterator[str]:
    """Yield the URL at which it answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = between.answer(self.path, self.headers["authorization"])
            self.send_response(answer.status_code)
            self.send_header("content-length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_the_printed_figures_are_those_of_metrics_and_of_the_clients(stack: Stack) -> None:
    between = Between(stack)
    with serving(between) as url:
        words = ("--url", url, "--interval", "0.5", "--admin-api-key-file", str(stack.log.parent / "key"))
        command = [sys.executable, "-P", "-c", PATIENT_FORETOKEN, "top", "--once", *words]
        result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    rows = {line[:23].strip(): line[23:].strip() for line in lines}
    rise = between.rise

    tokens = rise("engine_generated_tokens_total")
    assert tokens == between.num_tokens == sum(40 + number for number in range(NUM_REQUESTS))
    assert rise("request_success_total") == NUM_REQUESTS
    assert lines[0].startswith(f"demo at {url}: ready ")
    seconds = float(lines[0].split()[-2])
    check_rates(rows["Tokens a second"], {"output": tokens, "prompts": rise("engine_prompt_tokens_total")}, seconds)
    check_rates(rows["Requests a second"], {"finished": NUM_REQUESTS, "failed": 0, "refused": 0}, seconds)
    share = rise("spec_decode_num_accepted_tokens_total") / tokens
    assert 0.1 < share < 1
    accepted = rise("spec_decode_num_accepted_tokens_total")
    of_sequence = 1 + accepted / (rise("spec_decode_num_drafts_total") + rise("fallback_steps_total"))
    of_batch = tokens / rise("engine_steps_total")
    assert rows["Tokens a step"] == f"a sequence {of_sequence:.2f}, whole batch {of_batch:.2f}, from drafts {share:.0%}"
    assert rows["Requests"] == "running 0, waiting in verifiers 0 of 2048"
    found = rise("prefix_cache_hits_total") / rise("prefix_cache_queries_total")
    assert rows["Prefix cache"] == f"found {found:.0%} of prompt tokens"
    assert rows["Deaths and resumes"] == "verifiers up 1 of 1, outputs resumed 0, preemptions 0"
    for title, name in {
        "Time to first token": "time_to_first_token_seconds",
        "Time per output token": "request_time_per_output_token_seconds",
        "Inter-token latency": "inter_token_latency_seconds",
    }.items():
        for share, time in zip((0.5, 0.99), re.findall(r"[\d.]+ m?s", rows[title]), strict=True):
            low, high = bucket(between, name, share)
            assert low * 0.99 <= in_seconds(time) <= high * 1.01, (title, share, low, high)
    check_step(rows["Step, ms"], between)
    for name in DRAFTERS:
        check_drafter(next(line.split() for line in lines if line.startswith(f"{name} ")), name, between)
    # The last ones of the operator's view: each is one of those that were sent.
    last = [line.split() for line in lines[lines.index("") :] if line.endswith(" completions")]
    assert len(last) == 5
    assert {int(words[1].partition("+")[2]) for words in last} < {40 + number for number in range(NUM_REQUESTS)}


def check_rates(text: str, counts: dict[str, float], seconds: float) -> None:
    """Assert that rates and seconds have one digit after the point."""
    rates = {name: float(rate) for name, rate in (part.split() for part in text.split(", "))}
    assert rates.keys() == counts.keys()
    for name, rate in rates.items():
        assert (rate - 0.06) * (seconds - 0.06) <= counts[name] <= (rate + 0.06) * (seconds + 0.06), name


def check_drafter(words: list[str], name: str, between: Between) -> None:
    label = f'drafter="{name}"'
    drafts = between.rise("spec_decode_num_drafts_total", label)
    accepted = between.rise("spec_decode_num_accepted_tokens_total", label)
    drafted = between.rise("spec_decode_num_draft_tokens_total", label)
    assert words[:4] == [name, "attached", f"{accepted / drafted:.0%}", f"{1 + accepted / drafts:.2f}"]
    metric = "spec_decode_num_accepted_tokens_per_pos_total"
    # Deeper ones have none.
    assert words[4:] == [
        f"{accepted / drafts:.0%}"
        for position in range(8)
        if (accepted := between.rise(metric, label, f'position="{position}"'))
    ]


def check_step(text: str, between: Between) -> None:
    """Assert that all parts of a step together are at most
    the step, and two of them are as counted.
    """
    times = {name: float(time) for name, time in (part.rsplit(" ", 1) for part in text.split(", "))}
    num_steps = between.rise("engine_steps_total")

    def mean_ms(*phases: str) -> float:
        return sum(between.rise("step_time_us_total", f'phase="{phase}"') for phase in phases) / num_steps / 1e3

    assert times["verify"] == pytest.approx(mean_ms("forward", "verify"), abs=0.006)
    assert times["host"] == pytest.approx(mean_ms("schedule", "draft_post", "publish"), abs=0.006)
    assert times["draft"] == pytest.approx(1e3 * between.rise("drafter_draft_grow_s") / num_steps, abs=0.006)
    assert times["hand-over"] == pytest.approx(max(mean_ms("draft_wait") - times["draft"], 0), abs=0.012)


def bucket(between: Between, name: str, share: float) -> tuple[float, float]:
    """Return the bounds of the bucket in which a share of a histogram's observations ends."""
    bounds = dict.fromkeys(re.findall(rf'foretoken_{name}_bucket{{.*le="([^"]+)"', between.seen[1]))
    num_observed = between.rise(f"{name}_count")
    assert num_observed > 0
    low = 0.0
    for bound in bounds:
        if between.rise(f"{name}_bucket", f'le="{bound}"') >= share * num_observed:
            break
        low = float(bound)
    return low, float(bound)


def in_seconds(text: str) -> float:
    number, unit = text.split()
    return float(number) / (1e3 if unit == "ms" else 1)
