"""Compare log-probabilities with transformers at the widths of real models, with random weights.

    python tests/real_widths.py [name ...]    the names of WIDTHS; default: all

Each model has a few layers of each kind, of the published size, and a small vocabulary. Prompts run
in chunks, then 16 tokens are generated. Their log-probabilities in float32, and on a GPU in
bfloat16, are compared with those of transformers in float64. Their distance (root mean square) may
be 1.5 times that of transformers in the same dtype, and 4 times in float32, where little but the
order of sums makes it. The script ends with 1 if it is more.
"""

import sys
import tempfile
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma4TextConfig,
    Lfm2Config,
    Ministral3Config,
    PretrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from nanovllm import LLM, SamplingParams

LENGTHS = (1, 700, 2000)  # of the prompts
CHUNK = 900  # tokens of a step
NEW_TOKENS = 16
COMMON: dict[str, Any] = dict(vocab_size=8192, max_position_embeddings=4096, eos_token_id=None)
DELTA = COMMON | dict(
    num_hidden_layers=4,
    head_dim=256,
    linear_num_key_heads=16,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
)
EXPERTS = dict(num_experts_per_tok=8, moe_intermediate_size=512)
SHARED = EXPERTS | dict(shared_expert_intermediate_size=512)
WIDTHS: dict[str, PretrainedConfig] = {
    "qwen3.5-0.8b": Qwen3_5TextConfig(
        **DELTA | dict(hidden_size=1024, intermediate_size=3584, linear_num_value_heads=16),
        **dict(num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True),
    ),
    "qwen3.5-9b": Qwen3_5TextConfig(
        **DELTA | dict(hidden_size=4096, intermediate_size=12288, linear_num_value_heads=32),
        **dict(num_attention_heads=16, num_key_value_heads=4, tie_word_embeddings=False),
    ),
    "qwen3.5-35b-a3b": Qwen3_5MoeTextConfig(
        **DELTA | SHARED | dict(hidden_size=2048, linear_num_value_heads=32, num_experts=64),
        **dict(num_attention_heads=16, num_key_value_heads=2, tie_word_embeddings=False),
    ),
    "qwen3-next": Qwen3NextConfig(
        **DELTA | SHARED | dict(hidden_size=2048, linear_num_value_heads=32, num_experts=64),
        **dict(num_attention_heads=16, num_key_value_heads=2, tie_word_embeddings=False),
    ),
    "lfm2-1.2b": Lfm2Config(
        **COMMON | dict(hidden_size=2048, intermediate_size=12288, num_hidden_layers=4),
        **dict(num_attention_heads=32, num_key_value_heads=8, full_attn_idxs=[2]),
        **dict(conv_L_cache=3, pad_token_id=0, bos_token_id=None),
    ),
    "ministral3-3b": Ministral3Config(
        **COMMON | dict(hidden_size=3072, intermediate_size=9216, num_hidden_layers=3),
        **dict(num_attention_heads=32, num_key_value_heads=8, head_dim=128),
        tie_word_embeddings=True,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=1e6,
            factor=16.0,
            original_max_position_embeddings=1024,
            llama_4_scaling_beta=0.1,
        ),
    ),
    "gemma4-e2b": Gemma4TextConfig(
        **COMMON | dict(hidden_size=1536, intermediate_size=6144, num_hidden_layers=5),
        **dict(num_attention_heads=8, num_key_value_heads=1, head_dim=256, global_head_dim=512),
        **dict(hidden_size_per_layer_input=256, vocab_size_per_layer_input=8192, pad_token_id=0),
        layer_types=["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        num_kv_shared_layers=2,
        sliding_window=512,
        final_logit_softcapping=30.0,
    ),
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def save_model(folder: str, config: PretrainedConfig) -> None:
    """Save a random model of `config`, whose norms are random, too."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)


def run(folder: str, prompts: list[list[int]], dtype: str) -> tuple[list[list[int]], torch.Tensor]:
    """Generate greedily; return prompts with tokens, and log-probabilities of all but the first."""
    options = dict(max_num_batched_tokens=CHUNK, max_model_len=2304, max_num_seqs=16)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, logprobs=0, prompt_logprobs=0)
    with LLM(folder, dtype=dtype, device=DEVICE, gpu_memory_utilization=0.3, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    texts, found = [], []
    for prompt, output in zip(prompts, outputs):
        texts.append(prompt + output["token_ids"])
        entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        found += [entry[token].logprob for entry, token in zip(entries, texts[-1][1:])]
    return texts, torch.tensor(found, dtype=torch.float64)


@torch.inference_mode()
def reference(folder: str, texts: list[list[int]], dtype: torch.dtype) -> torch.Tensor:
    """Return what transformers gives for all tokens but the first ones."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(DEVICE).eval()
    model.config._experts_implementation = "eager"
    found = []
    for text in texts:
        ids = torch.tensor([text], device=DEVICE)
        logprobs = model(ids).logits[0, :-1].double().log_softmax(-1)
        found.append(logprobs.gather(1, ids[0, 1:, None])[:, 0].cpu())
    return torch.cat(found)


def rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


def main(names: list[str]) -> int:
    failed = 0
    for name in names or list(WIDTHS):
        config = WIDTHS[name]
        generator = torch.Generator().manual_seed(1)
        prompts = [
            torch.randint(config.vocab_size, (n,), generator=generator).tolist() for n in LENGTHS
        ]
        with tempfile.TemporaryDirectory() as folder:
            save_model(folder, config)
            for dtype in ("float32", "bfloat16") if DEVICE == "cuda" else ("float32",):
                texts, ours = run(folder, prompts, dtype)
                exact = reference(folder, texts, torch.float64)
                theirs = reference(folder, texts, getattr(torch, dtype))
                own, other = rms(ours - exact), rms(theirs - exact)
                failed += own > (1.5 if dtype == "bfloat16" else 4) * other
                print(f"{name}, {dtype}: {own:.2e}, transformers {other:.2e}, {len(ours)} tokens")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
