"""What the tests of the whole engine share: small models, prompts, and the output that
transformers gives for them.
"""

import random
from pathlib import Path

import torch
from model_helpers import make_checkpoint, mended
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GenerationConfig,
    Glm4Config,
    GptOssConfig,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
)

from nanovllm import LLM, SamplingParams

VOCAB = 199
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,  # unlike hidden_size / num_attention_heads
    max_position_embeddings=512,
    eos_token_id=None,
)
MODELS = {
    "gqa-1": Qwen3Config(**SHAPE | dict(num_key_value_heads=4)),
    "gqa-2": Qwen3Config(**SHAPE),
    "gqa-4": Qwen3Config(**SHAPE | dict(num_key_value_heads=1, head_dim=24)),
    "tied": Qwen3Config(**SHAPE | dict(tie_word_embeddings=True)),
    "attention-bias": Qwen3Config(**SHAPE | dict(attention_bias=True)),
    "experts": Qwen3MoeConfig(
        **SHAPE | dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24)
    ),
    "qwen2": Qwen2Config(**SHAPE),
    "llama": LlamaConfig(**SHAPE),
    "mistral": MistralConfig(**SHAPE | dict(sliding_window=None)),
}
# Three of four layers have a state instead of K and V.
DELTA = SHAPE | dict(
    num_hidden_layers=4,
    linear_num_key_heads=3,
    linear_num_value_heads=9,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
)
SHARED_EXPERT = dict(
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=20,
)
# Further families, with what sets each apart.
FAMILIES = {
    "phi3": Phi3Config(
        **SHAPE | dict(hidden_size=64, pad_token_id=0),
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.75),
    ),
    "olmo2": Olmo2Config(**SHAPE | dict(head_dim=8, pad_token_id=0)),
    "glm4": Glm4Config(**SHAPE | dict(head_dim=12, pad_token_id=0)),
    "granite": GraniteConfig(
        **SHAPE | dict(residual_multiplier=0.7, attention_multiplier=0.4, logits_scaling=0.5),
        embedding_multiplier=3.0,
    ),
    "smollm3": SmolLM3Config(
        **SHAPE | dict(no_rope_layers=[1, 0], pad_token_id=0, tie_word_embeddings=False)
    ),
    "seed-oss": SeedOssConfig(**SHAPE),
    "gpt-oss": GptOssConfig(
        **SHAPE | dict(intermediate_size=24, sliding_window=19, head_dim=12),
        num_local_experts=6,
        num_experts_per_tok=3,
        swiglu_limit=0.8,
    ),
    # Windows that end inside blocks of 16, and before prompts do.
    "mistral-window": MistralConfig(**SHAPE | dict(sliding_window=21)),
    # Queries count more from position 12 on.
    "ministral3": Ministral3Config(
        **SHAPE | dict(tie_word_embeddings=True),
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=1e4,
            factor=16.0,
            original_max_position_embeddings=12,
            llama_4_scaling_beta=0.5,
        ),
    ),
    "qwen2-window": Qwen2Config(
        **SHAPE | dict(sliding_window=18, use_sliding_window=True, max_window_layers=1)
    ),
    "olmo3": Olmo3Config(
        **SHAPE | dict(head_dim=8, pad_token_id=0, sliding_window=18, num_hidden_layers=4)
    ),
    "gemma3": Gemma3TextConfig(
        **SHAPE | dict(head_dim=12, pad_token_id=0, sliding_window=17, query_pre_attn_scalar=2),
        layer_types=["sliding_attention", "full_attention"],
    ),
    # The last two layers share the keys and values of the first two kinds.
    "gemma4": Gemma4TextConfig(
        **SHAPE | dict(head_dim=8, pad_token_id=0, sliding_window=19, num_hidden_layers=5),
        global_head_dim=16,
        layer_types=["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        num_kv_shared_layers=2,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        hidden_size_per_layer_input=6,
        vocab_size_per_layer_input=VOCAB,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=12,
        final_logit_softcapping=30.0,
    ),
    "gemma2": Gemma2Config(
        **SHAPE | dict(head_dim=12, pad_token_id=0, sliding_window=23, query_pre_attn_scalar=2),
        attn_logit_softcapping=3.0,
    ),
    "lfm2": Lfm2Config(
        **SHAPE | dict(num_hidden_layers=3, head_dim=8, pad_token_id=0, bos_token_id=None),
        full_attn_idxs=[1],
        conv_L_cache=4,
        block_multiple_of=8,
        tie_word_embeddings=False,
    ),
    "qwen3.5": Qwen3_5TextConfig(**DELTA),
    "qwen3.5-moe": Qwen3_5MoeTextConfig(
        **DELTA | dict(linear_num_key_heads=2, linear_num_value_heads=6), **SHARED_EXPERT
    ),
    "qwen3-next": Qwen3NextConfig(
        **DELTA | dict(linear_num_key_heads=1, linear_num_value_heads=4), **SHARED_EXPERT
    ),
}


def save_checkpoint(folder: Path, config: PretrainedConfig, seed: int = 2) -> None:
    model = make_checkpoint(folder, config, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                # Attention that chooses: the output varies, and depends on every token.
                parameter.mul_(1 if config.model_type == "gemma4_text" else 2)  # does not scale
    model.save_pretrained(folder, max_shard_size="40KB")


def save_tokenizer(folder: Path, eos_token: str | None = None) -> None:
    """Words "0" to "198", each the token of that number."""
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos_token).save_pretrained(folder)


def make_prompts(seed: int = 0) -> list[list[int]]:
    """From one token to several blocks of 16, around their borders; some begin alike."""
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(VOCAB) for _ in range(length)] for length in (1, 2, 15, 16, 17, 33, 64, 70)
    ]
    return prompts + [prompts[6][:40] + prompts[5][:5], prompts[7][:48], prompts[6][:32] + [5]]


PROMPTS = make_prompts()


class Checkpoint:
    """A folder, and the greedy continuations that transformers computes from it in float32."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._model = mended(model)
        self._model.generation_config = GenerationConfig()  # without an end of sequence
        self._outputs: dict[tuple[int, ...], list[int]] = {}

    def expected(self, prompt: list[int], count: int) -> list[int]:
        """The `count` tokens that follow, past any end of sequence."""
        known = self._outputs.get(tuple(prompt), [])
        if len(known) < count:
            known = self._outputs[tuple(prompt)] = self._generate(prompt, max(count, 24))
        return known[:count]

    def probabilities(self, prompt: list[int], temperature: float) -> list[float]:
        """Of each token to come next."""
        with torch.no_grad():
            return (
                (self._model(torch.tensor([prompt])).logits[0, -1] / temperature)
                .softmax(-1)
                .tolist()
            )

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), VOCAB]: of what follows each token."""
        with torch.no_grad():
            return self._model(torch.tensor([tokens])).logits[0].log_softmax(-1)

    def _generate(self, prompt: list[int], count: int) -> list[int]:
        how = GenerationConfig(
            max_new_tokens=count, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        ids = torch.tensor([prompt])
        answer = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=how
        )
        first, second = torch.cat(answer.logits).topk(2).values.unbind(-1)
        assert (first - second).min() > 1e-4, (
            "a near tie: rounding could decide it, choose another prompt"
        )
        return answer.sequences[0, len(prompt) :].tolist()


def greedy(max_tokens: int, ignore_eos: bool = True) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos)


def assert_greedy(
    llm: LLM, checkpoint: Checkpoint, prompts: list[list[int]] = PROMPTS, max_tokens: int = 24
) -> None:
    """One call gives what transformers gives for each prompt alone, and leaves the engine empty."""
    outputs = llm.generate(prompts, greedy(max_tokens), use_tqdm=False)
    assert [output["token_ids"] for output in outputs] == [
        checkpoint.expected(prompt, max_tokens) for prompt in prompts
    ]
    assert [output["finish_reason"] for output in outputs] == ["length"] * len(prompts)
    assert_empty(llm)


def assert_empty(llm: LLM) -> None:
    """No request is left and no block is referenced."""
    scheduler = llm.engine.scheduler
    assert not llm.engine.has_unfinished() and not scheduler.waiting and not scheduler.decoding
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks and not any(
        scheduler.blocks.ref_counts
    )
    assert scheduler.num_running == 0
    assert llm.engine._in_flight is None and not scheduler._steps_in_flight
