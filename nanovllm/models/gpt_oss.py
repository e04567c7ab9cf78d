"""gpt-oss: a Llama with biases, attention sinks, windows in every second layer, and experts.

The experts take the place of MLPs, and clamp their gates and ups.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from nanovllm.layers.moe import ClampedSwiGLU, Experts, MixtureOfExperts
from nanovllm.models.model_config import ExpertsConfig
from nanovllm.models.transformer import CausalLM, DecoderLayer, build_attention
from nanovllm.weights.weight_slice import WeightSlice


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(ExpertsConfig):
    has_windows: ClassVar = True
    default_rope: ClassVar = {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }

    num_key_value_heads: int = 8
    head_dim: int = 64
    rms_norm_eps: float = 1e-5
    attention_bias: bool = True
    sliding_window: int | None = 128
    full_attention_interval: int | None = 2
    rope_theta: float = 150_000.0
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0


class GptOssExperts(Experts):
    """Experts whose checkpoints hold one tensor [E, in, out], with gates and ups alternating."""

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        assert self.gate_up_bias is not None and self.down_bias is not None
        count, hidden, shard = self.down_proj.shape
        width, first, every = self.intermediate_size, self.group.rank * shard, slice(None)
        gate_up, down = f"{path}.gate_up_proj", f"{path}.down_proj"
        for one in (slice(i, i + 1) for i in range(count)):
            for i, rows in enumerate((slice(shard), slice(shard, None))):  # gates, ups
                ours = slice(2 * first + i, 2 * (first + shard), 2)
                weight, bias = self.gate_up_proj[one, rows].mT, self.gate_up_bias[one, rows]
                yield WeightSlice(gate_up, weight, (one, every, ours), (count, hidden, 2 * width))
                yield WeightSlice(f"{gate_up}_bias", bias, (one, ours), (count, 2 * width))
            weight, ours = self.down_proj[one].mT, slice(first, first + shard)
            yield WeightSlice(down, weight, (one, ours, every), (count, width, hidden))
        yield WeightSlice(f"{down}_bias", self.down_bias, (every, every), (count, hidden))


class GptOssForCausalLM(CausalLM):
    config_class = GptOssConfig
    stacks_experts = True
    checkpoint_names = {"gate": "router"}

    def build_layer(self, config: GptOssConfig, index, rotary, group):
        bias = config.attention_bias
        attention = build_attention(config, index, rotary, group, bias=bias, sinks=True)
        mlp = MixtureOfExperts(
            config.hidden_size,
            config.intermediate_size,
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            group=group,
            renormalize=True,
            bias=True,
            experts=GptOssExperts,
            gating=ClampedSwiGLU(config.swiglu_alpha, config.swiglu_limit),
        )
        return DecoderLayer(config, attention, mlp)
