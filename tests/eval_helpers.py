"""Small tasks of each kind for lm-evaluation-harness, and the comparison of two models on them.

    python tests/eval_helpers.py FOLDER

runs them with a model of yours on the CPU, by this library and by the harness on transformers, and
tells what time each takes.
"""

import json
import sys
from pathlib import Path
from time import process_time
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("accelerate", reason="the harness's own model needs it")

from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "# {{ message.role }}: {{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}# assistant: {% endif %}"
    "{% if enable_thinking %}# thought: {{ effort }} {% endif %}"
)
CODE = [
    "import os\nimport sys\n\n\ndef main():\n    if len(sys.argv) != 2:\n        sys.exit(1)\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "def read_lines(path):\n    with open(path) as f:\n        return f.readlines()\n",
    "try:\n    import threading\nexcept ImportError:\n    threading = None\n",
    "for key, value in sorted(d.items()):\n    print(key, value)\n",
    "    def test_repr(self):\n        self.assertEqual(repr(self.x), 'x')\n",
    "    def __eq__(self, other):\n        return self.name == other.name\n",
    "def factorial(n):\n    return 1 if n == 0 else n * factorial(n - 1)\n",
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/data.jsonl
  cache_dir: {folder}/cache
test_split: test
fewshot_split: test
target_delimiter: ""
"""
# Of each kind of request that the harness makes, a task.
TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    "perplexity": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}{{choices[gold]}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
""",
    "completions": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{choices[gold]}}"
generation_kwargs:
  until: ["\\n\\n", "):", "<|endoftext|>"]
  max_gen_toks: 24
metric_list:
  - metric: exact_match
""",
}


def write_tasks(folder: Path, texts: list[str]) -> Path:
    """Task files and their data: to tell how each text goes on, and to go on."""
    halves = [(text[: len(text) // 2], text[len(text) // 2 :]) for text in texts]
    ends = [end for _, end in halves]
    with open(folder / "data.jsonl", "w") as file:
        for i, (begin, _) in enumerate(halves):
            choices = [ends[(i + k) % len(ends)] for k in range(4)]
            gold = i % 4
            choices[0], choices[gold] = choices[gold], choices[0]
            file.write(json.dumps({"text": begin, "choices": choices, "gold": gold}) + "\n")
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, folder=folder) + text)
    return folder


def evaluate(model: LM, folder: Path, **options: Any) -> dict[str, Any]:
    """What the harness returns for the tasks of `folder`, with all samples."""
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    how = dict(task_manager=manager, bootstrap_iters=0) | options
    with patch("lm_eval.evaluator.add_env_info"):  # which runs commands for seconds
        return simple_evaluate(model, tasks=[*TASKS], **how)


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Assert that two results have near likelihoods and metrics, and the same texts and choices."""
    assert {*ours["results"]} == {*TASKS}
    for task, metrics in ours["results"].items():
        for name, value in metrics.items():
            assert near(value, theirs["results"][task][name]), (task, name)
        for our, their in zip(ours["samples"][task], theirs["samples"][task], strict=True):
            assert our["arguments"] == their["arguments"]
            for (one,), (other,) in zip(our["resps"], their["resps"], strict=True):
                assert near(one, other), our["arguments"]


def near(one: Any, other: Any) -> bool:
    """Tell whether numbers are within 3e-4 or 2e-6 of their size, and all else is equal.

    A likelihood is a sum of float32s. Compared with float64, this library and the harness's model
    were each up to 2.0e-4 off; in a likelihood of -33.5, 9.3e-5 and 1.4e-5 (a Xeon with AVX-512).
    """
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(near, one, other))
    if isinstance(one, float):
        return one == pytest.approx(other, rel=2e-6, abs=3e-4)
    return one == other


def main() -> None:
    import tempfile

    from lm_eval.models.huggingface import HFLM

    from nanovllm.apps.lm_eval import NanovllmLM

    folder = sys.argv[1]
    readme = (Path(__file__).parent.parent / "nanovllm" / "README.md").read_text()
    texts = [text for text in readme.split("\n\n") if 200 < len(text) < 600][:16]
    makers = {
        "nanovllm": lambda: NanovllmLM(folder, device="cpu", dtype="float32", max_model_len=2048),
        "hf": lambda: HFLM(folder, device="cpu", dtype="float32", batch_size=8, max_length=2048),
    }
    with tempfile.TemporaryDirectory() as tasks:
        write_tasks(Path(tasks), texts)
        for chat in (False, True):
            results = {}
            for name, make in makers.items():
                model = make()
                begin = process_time()
                results[name] = evaluate(model, Path(tasks), apply_chat_template=chat)
                print(
                    f"{name}, chat={chat}: {process_time() - begin:.1f} s of processor time",
                    flush=True,
                )
            assert_same(*results.values())
            print("the answers are the same")


if __name__ == "__main__":
    main()
