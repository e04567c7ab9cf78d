"""A random small Qwen3 with a byte-level tokenizer, and its plain continuation, for the tests of
sampling and calls.
"""

import json
import random
from pathlib import Path

import torch
from model_helpers import make_checkpoint
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from nanovllm import LLM

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
END = 256  # <|end|>; then <|user|> and <|assistant|>, and a few tokens of several bytes
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + m.role) }}"
    "{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "<|assistant|>{% if not enable_thinking | default(true) %}no{% endif %}"
    "{% endif %}"
)


def make_tokenizer(chat: bool = True) -> PreTrainedTokenizerFast:
    """One token for each byte and merges of a few, so that characters are split over tokens."""
    vocab = {byte: i for i, byte in enumerate(BYTES)}
    vocab |= {name: 256 + i for i, name in enumerate(("<|end|>", "<|user|>", "<|assistant|>"))}
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "the")]
    vocab |= {a + b: len(vocab) + i for i, (a, b) in enumerate(merges)}
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|end|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE if chat else None
    return tokenizer


def make_folder(
    folder: Path, *, tokenizer: bool = True, chat: bool = True, head_dim: int = 16
) -> Path:
    config = Qwen3Config(
        vocab_size=263,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=None,
    )
    make_checkpoint(folder, config)
    if tokenizer:
        make_tokenizer(chat).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    return folder


class Plain:
    """The same model by transformers, a token at a time, without a cache."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([tokens])).logits[0, -1]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens).argmax()))
        return tokens[len(prompt) :]


def make_llm(folder, **options):
    sizes = dict(kvcache_block_size=16, num_kvcache_blocks=128, max_model_len=256, max_num_seqs=8)
    return LLM(folder, **{**sizes, **options})


class LaunchClock:
    """The engine's clock, which goes on by a second at each launch and by nothing else."""

    def __init__(self, llm, monkeypatch) -> None:
        self.now = 0.0
        self._launch = llm.engine.runner.launch
        monkeypatch.setattr(llm.engine.runner, "launch", self._slow_launch)
        monkeypatch.setattr("nanovllm.engine.llm_engine.perf_counter", lambda: self.now)

    def _slow_launch(self, batch):
        self.now += 1.0
        return self._launch(batch)


def check_empty(llm):
    scheduler = llm.engine.scheduler
    assert not scheduler.has_unfinished() and not llm.has_unfinished() and not llm.engine._in_flight
    assert not any(scheduler.blocks.ref_counts)
    assert scheduler.num_running == 0
    assert llm.engine.detokenizer is None or not llm.engine.detokenizer._reading


def generate(llm, prompts, params=None):
    return completed(llm.generate(prompts, params, use_tqdm=False))


def completed(outputs):
    """Outputs without what is said of the prompt: the prefix cache holds more of it when it
    comes again.
    """
    prompts = ("prompt_token_ids", "num_cached_tokens")
    return [
        {key: value for key, value in output.items() if key not in prompts} for output in outputs
    ]


def random_prompts(count, seed=0):
    r = random.Random(seed)
    return [[r.randrange(256) for _ in range(r.randint(1, 40))] for _ in range(count)]
