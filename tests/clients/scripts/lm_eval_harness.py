"""lm-eval: log-likelihoods equal transformers', and generated
answers are the same without speculation.
"""

import json
import os
from pathlib import Path

os.environ["HF_DATASETS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"

import lm_eval
import server
from lm_eval.tasks import TaskManager

QUESTIONS = [
    {"question": "def add(a, b):\n    return", "choices": [" a + b", " a - b", " None"], "answer": 0},
    {"question": "for i in range(10):\n    print(", "choices": ["i)", "x)", "10)"], "answer": 0},
    {
        "question": "class Point:\n    def __init__(self, x, y):\n        self.x =",
        "choices": [" x", " y", " 0"],
        "answer": 0,
    },
    {"question": "import os\nfor name in os.", "choices": ["listdir(path):", "walk", "name"], "answer": 0},
]
Path("data.jsonl").write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
COMMON = (
    "dataset_path: json\ndataset_kwargs:\n  data_files: {test: data.jsonl}\ntest_split: test\n"
    "doc_to_text: '{{question}}'\n"
)
Path("choices.yaml").write_text(
    f"task: choices\n{COMMON}output_type: multiple_choice\ndoc_to_choice: '{{{{choices}}}}'\ndoc_to_target: answer\n"
    "target_delimiter: ''\n"
)
Path("written.yaml").write_text(
    f"task: written\n{COMMON}output_type: generate_until\ndoc_to_target: '{{{{choices[0]}}}}'\n"
    'generation_kwargs:\n  until: ["\\n\\n\\n"]\n  max_gen_toks: 100\n  temperature: 0\n'
    "metric_list:\n  - metric: exact_match\n"
)
manager = TaskManager(include_path=".", include_defaults=False)


def evaluate(model: str, arguments: dict[str, object], tasks: list[str]) -> dict[str, list[dict[str, object]]]:
    """Return the samples of each task."""
    found = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=tasks, task_manager=manager, log_samples=True, bootstrap_iters=0
    )
    return found["samples"]


ours = {
    "model": server.MODEL,
    "base_url": f"{server.BASE_URL}/completions",
    "tokenizer": server.TOKENIZER,
    "tokenizer_backend": "huggingface",
    "num_concurrent": 4,
}
served = evaluate("local-completions", ours, ["choices", "written"])
reference = evaluate("hf", {"pretrained": server.TOKENIZER, "dtype": "float32", "device": "cpu"}, ["choices"])
most = 0.0
for mine, theirs in zip(served["choices"], reference["choices"], strict=True):
    for (got,), (expected,) in zip(mine["resps"], theirs["resps"], strict=True):
        most = max(most, abs(float(got[0]) - float(expected[0])))
assert most <= 1e-3, f"log-likelihoods differ by {most}"
for sample in served["written"]:
    body = {
        "model": server.MODEL,
        "prompt": sample["arguments"][0][0],
        "max_tokens": 100,
        "temperature": 0,
        "stop": ["\n\n\n"],
        "speculative": {"enabled": False},
    }
    plain = server.post("/v1/completions", body)["choices"][0]["text"]
    assert sample["resps"][0][0] == plain, (sample["resps"], plain)
print(f"log-likelihoods differ from transformers' by {most:.1e} at most")
