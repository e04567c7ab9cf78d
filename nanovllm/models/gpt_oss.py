"""gpt-oss: a Llama with biases, attention sinks, windows in every second layer, and experts.

The experts take the place of MLPs, and clamp their gates and ups.
"""

from collections.abc import Iterator

from nanovllm.layers.moe import ClampedSwiGLU, Experts, MixtureOfExperts
from nanovllm.models.checks import check_experts, check_number
from nanovllm.models.transformer import CausalLM, DecoderLayer, build_attention
from nanovllm.weights.weight_slice import WeightSlice


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
    has_windows = True
    stacks_experts = True
    checkpoint_names = {"gate": "router"}

    @classmethod
    def check(cls, config):
        check_experts(config, ("num_local_experts", "num_experts_per_tok"))
        check_number(config, "swiglu_alpha", may_be_none=True)
        check_number(config, "swiglu_limit", may_be_none=True)

    def build_layer(self, config, index, rotary, group):
        bias = config.attention_bias
        attention = build_attention(config, index, rotary, group, bias=bias, sinks=True)
        alpha, limit = getattr(config, "swiglu_alpha", None), getattr(config, "swiglu_limit", None)
        mlp = MixtureOfExperts(
            config.hidden_size,
            config.intermediate_size,
            config.num_local_experts,
            config.num_experts_per_tok,
            group,
            renormalize=True,
            bias=True,
            experts=GptOssExperts,
            gating=ClampedSwiGLU(alpha or 1.702, limit or 7.0),
        )
        return DecoderLayer(config, attention, mlp)
