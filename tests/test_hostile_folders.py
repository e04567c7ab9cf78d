"""Damaged and lying model folders: each is refused by an error that says what is wrong, or runs as
transformers runs it. Never another error, a hang, a crash, or a line of the folder's code.
"""

import os
import pickle
import resource
import shutil
import sys
import warnings
from pathlib import Path

import pytest
import torch
from call_helpers import make_folder
from effort import tries
from folder_damage import JSON_FILES, changes, damage
from hypothesis import given
from process_helpers import in_fork
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from nanovllm import LLM, SamplingParams

GIB = 2**30
CODE = "raise SystemExit('code of the folder runs')"
FORBIDDEN = ("pickle.find_class", "socket.connect", "os.system", "subprocess.Popen", "os.exec")
TEXTS = ["the in the", "naïve \n ", "q"]
PROMPTS = [[1, 2, 3], [250, 40, 7, 7, 9, 100], [5] * 20]


@pytest.fixture(scope="module")
def whole(fresh, tmp_path_factory) -> Path:
    """Made where it is used, so that each fork finds imported what that takes."""
    folder = fresh(make_folder, tmp_path_factory.mktemp("whole"))
    (folder / "code.py").write_text(CODE)
    return folder


def forbid(event: str, arguments: tuple) -> None:
    """An audit hook. What a folder makes happen here ends the process."""
    is_code = event == "open" and str(arguments[0]).endswith("code.py")
    if event in FORBIDDEN or is_code:
        os.write(2, f"{event} {arguments}\n".encode())
        os._exit(77)


def use_in_fork(folder: Path) -> tuple[str, str] | str:
    """What `use` returns, or the text of what it raises."""
    return in_fork(lambda: use(folder))


def use(folder: Path) -> tuple[str, str]:
    """Load a folder and use it; whether it was refused or served, and how."""
    # A folder that lies about its sizes must not take the machine's memory.
    resource.setrlimit(resource.RLIMIT_AS, (16 * GIB, 16 * GIB))
    os.environ |= {"TOKENIZERS_PARALLELISM": "false"}
    sys.addaudithook(forbid)
    logging.set_verbosity(logging.CRITICAL)
    warnings.simplefilter("ignore")
    try:
        llm = LLM(folder, device="cpu", kvcache_block_size=16, num_kvcache_blocks=32)
    except (ValueError, TypeError) as error:
        return "refused", str(error)
    params = SamplingParams(temperature=0, max_tokens=8)
    with llm:
        try:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        except (ValueError, FloatingPointError) as error:
            return "refused", str(error)
        if problems := [output["error"] for output in outputs if "error" in output]:
            return "refused", problems[0]
        check_tokens(folder, outputs)
        said = check_texts(llm, folder, outputs)
    return "served", said


def check_tokens(folder: Path, outputs: list[dict]) -> None:
    """Each token is the likeliest by transformers, if that takes the folder too."""
    try:
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    except Exception:
        return
    for output in outputs:
        tokens = output["prompt_token_ids"] + output["token_ids"]
        with torch.no_grad():
            logits = reference(torch.tensor([tokens])).logits[0]
        for at in range(len(output["prompt_token_ids"]), len(tokens)):
            best, own = logits[at - 1].max(), logits[at - 1, tokens[at]]
            assert best - own < 1e-3 * (1 + best.abs()), f"token {at} of {tokens} is wrong"


def check_texts(llm: LLM, folder: Path, outputs: list[dict]) -> str:
    """Texts are cut into tokens, and tokens make texts, as by transformers' tokenizer."""
    try:
        encoded = llm.encode(TEXTS)
        llm.encode_chat([{"role": "user", "content": "the"}])
    except (ValueError, TypeError) as error:
        return str(error)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        expected = tokenizer(TEXTS)["input_ids"]
    except Exception:
        return ""
    assert encoded == expected
    for output in outputs:
        options = dict(skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert output["text"] == tokenizer.decode(output["token_ids"], **options)
    return ""


@tries(30)
@given(changes())
def test_a_damaged_folder_is_refused_or_runs_as_transformers_runs_it(
    fresh, whole, tmp_path_factory, changes
):
    folder = tmp_path_factory.mktemp("damaged", numbered=True)
    try:
        shutil.copytree(whole, folder, dirs_exist_ok=True)
        names = {damage(folder, change) for change in changes}
        answer = fresh(use_in_fork, folder)
        assert isinstance(answer, tuple), f"{names}: {answer}"
        what, said = answer
        if what == "refused":
            assert says_where(said), f"{names}: {said}"
    finally:
        shutil.rmtree(folder)


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


FILES = ("config.json", "model-00001-of-00005.safetensors", "model.safetensors.index.json")
FILES += ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
FILES += ("pytorch_model.bin", "generation_config.json", "chat_template.jinja")


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_a_pickle_is_not_unpickled_whatever_file_it_is(fresh, whole, tmp_path, name, alone):
    """`alone`: there are no other weights, nor another file of the tokenizer."""
    folder = shutil.copytree(whole, tmp_path / "damaged")
    if alone:
        for path in (*folder.glob("model*"), folder / "tokenizer.json"):
            path.unlink()
    (folder / name).write_bytes(pickle.dumps(Evil()))
    answer = fresh(use_in_fork, folder)
    assert isinstance(answer, tuple), answer
    assert answer[0] == "refused" or not alone


def unpickle(_):
    return pickle.loads(pickle.dumps(Evil()))


def read_code(folder: Path):
    return (folder / "code.py").read_text()


def audit_in_fork(bad, folder: Path):
    in_fork(lambda: (sys.addaudithook(forbid), bad(folder)))


@pytest.mark.parametrize("bad", [unpickle, read_code])
def test_the_audit_sees_what_it_is_for(fresh, whole, bad):
    with pytest.raises(AssertionError, match=f"wait status {77 << 8}"):
        fresh(audit_in_fork, bad, whole)


def says_where(said: str) -> bool:
    """Whether an error names a file, the folder, or a field and its value; and what to do."""
    places = (*JSON_FILES, "safetensors", "damaged", " is ", "request ")
    return ":" in said and any(place in said for place in places)
