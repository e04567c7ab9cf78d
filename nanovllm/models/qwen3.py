"""Qwen3: a stack of pre-norm blocks. Attention has grouped key-value heads, and norms q and k before rotating them; the
MLP is SwiGLU; each block adds its two results to the residual stream.

T tokens of any number of sequences go through at once, packed one after the other. Which token attends to which is the
step's metadata, and only attention reads it.
"""

from torch import Tensor, nn

from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.utils.parallel import ParallelGroup


class Qwen3Attention(nn.Module):
    def __init__(self, config, rotary: RotaryEmbedding, group: ParallelGroup):
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.qkv_proj = QKVParallelLinear(hidden, heads, kv_heads, head_dim, group, bias=bias)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.attn = Attention(self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, head_dim, rotary)
        self.o_proj = RowParallelLinear(heads * head_dim, hidden, group, bias=bias)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        qkv = self.qkv_proj(x)  # [T, hidden] -> [T, (H + 2G) D]
        heads = self.attn(qkv, positions, self.q_norm, self.k_norm)  # [T, H D]
        return self.o_proj(heads)  # [T, hidden]


class Qwen3MLP(nn.Module):
    def __init__(self, config, group: ParallelGroup):
        super().__init__()
        hidden, intermediate = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(hidden, intermediate, group, names=("gate_proj", "up_proj"))
        self.act = SiluAndMul()
        self.down_proj = RowParallelLinear(intermediate, hidden, group)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_up_proj(x)))


class Qwen3Layer(nn.Module):
    def __init__(self, config, rotary: RotaryEmbedding, group: ParallelGroup):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Qwen3Attention(config, rotary, group)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Qwen3MLP(config, group)

    def forward(self, x: Tensor, residual: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor]:
        # What a block adds to the residual stream is left to the next norm, which does both in one pass.
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, positions)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class Qwen3Model(nn.Module):
    def __init__(self, config, group: ParallelGroup):
        super().__init__()
        rotary = RotaryEmbedding.from_config(config, config.head_dim)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, group)
        self.layers = nn.ModuleList(Qwen3Layer(config, rotary, group) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x, residual = self.embed_tokens(input_ids), None  # [T] -> [T, hidden]
        for layer in self.layers:
            x, residual = layer(x, residual, positions)
        x, _ = self.norm(x, residual)
        return x


class Qwen3ForCausalLM(nn.Module):
    def __init__(self, config, group: ParallelGroup):
        super().__init__()
        self.model = Qwen3Model(config, group)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, group, tied_to=tied_to)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Token ids and their positions, [T] each -> hidden states [T, hidden]."""
        return self.model(input_ids, positions)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[B, hidden] -> [B, V]; on several ranks, this one's part of the vocabulary."""
        return self.lm_head(hidden)
