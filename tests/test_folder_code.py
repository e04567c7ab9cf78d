"""A model folder's Python code is never run, and nobody is asked whether it may be."""

import json
import os
import subprocess
import sys
from itertools import product

import pytest
from call_helpers import make_folder

CODE = """
import os
open(os.environ["PROOF"], "w").write(__name__)
from transformers import PretrainedConfig, PreTrainedTokenizerFast
class Custom(PretrainedConfig):
    model_type = "custom"
class CustomTokenizer(PreTrainedTokenizerFast):
    pass
"""
CONFIG_MAP = {"AutoConfig": "code.Custom", "AutoModelForCausalLM": "code.Custom"}
TOKENIZER_MAP = {"AutoTokenizer": ["code.CustomTokenizer", "code.CustomTokenizer"]}
TYPES = (None, "nonsense", "qwen3", "qwen2")
CLASSES = (None, "CustomTokenizer", "PreTrainedTokenizerFast", "Qwen2Tokenizer")

# Reads each folder as LLM does, and chats where it can. An error is as good as an answer.
READ_ALL = """
import sys
from pathlib import Path
from nanovllm.models import load_model_config
from nanovllm.frontend.tokenizer import load_tokenizer
from nanovllm.weights.model_files import load_eos_ids
for name in sys.argv[1:]:
    folder = Path(name)
    for read in (lambda: load_model_config(folder), lambda: load_eos_ids(folder)):
        try:
            read()
        except ValueError:
            pass
    try:
        tokenizer = load_tokenizer(folder)
        tokenizer.encode_chats([[{"role": "user", "content": "hello"}]], {})
        print("chatted")
    except ValueError as error:
        assert "trust_remote_code" not in str(error) or "never run" in str(error), error
"""


def write_code(folder, model_type, tokenizer_class, *, in_config, in_tokenizer, complete):
    """Make the folder ask for its own code. `complete`: config.json names all that models read."""
    (folder / "code.py").write_text(CODE)
    values = json.loads((folder / "config.json").read_text())
    config = values | {"model_type": model_type, "architectures": ["Qwen3ForCausalLM"]}
    config |= (
        {"auto_map": CONFIG_MAP | (TOKENIZER_MAP if in_tokenizer else {})} if in_config else {}
    )
    config |= {"sliding_window": None, "use_sliding_window": False}
    dropped = () if complete else ("rms_norm_eps",)
    config = {k: v for k, v in config.items() if k not in dropped and (v or k != "model_type")}
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "tokenizer_config.json"
    tokenizer = json.loads(path.read_text()) | {"tokenizer_class": tokenizer_class}
    if tokenizer_class is None:
        del tokenizer["tokenizer_class"]
    tokenizer |= {"auto_map": TOKENIZER_MAP} if in_tokenizer else {}
    path.write_text(json.dumps(tokenizer))


@pytest.mark.parametrize("in_config, in_tokenizer", [(True, False), (False, True), (True, True)])
def test_no_folder_gets_its_code_run_whatever_stdin_answers(tmp_path, in_config, in_tokenizer):
    folders = []
    for i, (model_type, kind, complete) in enumerate(product(TYPES, CLASSES, (True, False))):
        folders.append(tmp_path / str(i))
        make_folder(folders[-1])
        wants = dict(in_config=in_config, in_tokenizer=in_tokenizer, complete=complete)
        write_code(folders[-1], model_type, kind, **wants)
    proof = tmp_path / "proof"
    # Not the user's cache, where transformers would copy the code to.
    env = os.environ | {
        "PROOF": str(proof),
        "HF_HOME": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-c", READ_ALL, *map(str, folders)]
    answers = "y\n" * 1000
    run = subprocess.run(command, input=answers, capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr
    assert not proof.exists(), proof.read_text()
    assert "[y/N]" not in run.stdout + run.stderr
    assert run.stdout.count("chatted") >= len(folders) // 2
