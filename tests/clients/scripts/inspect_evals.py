"""inspect-ai: an evaluation of two samples through its OpenAI-compatible provider."""

import os

import server

os.environ["FORETOKEN_BASE_URL"] = server.BASE_URL
os.environ["FORETOKEN_API_KEY"] = server.KEY

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

expected = server.chat_text(40)
samples = [Sample(server.QUESTION, target=expected[:10], id=number) for number in (1, 2)]
task = Task(dataset=samples, solver=generate(), scorer=includes())
(log,) = eval(
    task, model=f"openai-api/foretoken/{server.MODEL}", max_tokens=40, temperature=0, display="plain", log_dir="logs"
)
assert log.status == "success", log.error
assert [sample.output.completion for sample in log.samples] == [expected] * 2
assert log.results.scores[0].metrics["accuracy"].value == 1.0
