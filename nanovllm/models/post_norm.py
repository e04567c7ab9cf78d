"""Layers that norm the outputs of attention and MLP before they join the residual stream."""

from torch import Tensor, nn

from nanovllm.layers.norm import RMSNorm
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.transformer import DecoderLayer


class PostNormLayer(nn.Module):
    """A layer that norms the outputs of attention and MLP, and not their inputs (OLMo 2)."""

    def __init__(self, config: ModelConfig, self_attn: nn.Module, mlp: nn.Module):
        super().__init__()
        self.self_attn = self_attn
        self.attention_output_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp
        self.mlp_output_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.attention_output_norm(self.self_attn(x, positions))
        return x + self.mlp_output_norm(self.mlp(x))


class SandwichNormLayer(DecoderLayer):
    """A layer that norms the inputs and the outputs of attention and MLP (GLM-4, Gemma 2)."""

    def __init__(
        self,
        config: ModelConfig,
        self_attn: nn.Module,
        mlp: nn.Module,
        norm: type[RMSNorm] = RMSNorm,
    ):
        super().__init__(config, self_attn, mlp, norm)
        self.attention_output_norm = norm(config.hidden_size, config.rms_norm_eps)
        self.mlp_output_norm = norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.attention_output_norm(self.self_attn(self.input_layernorm(x), positions))
        return x + self.mlp_output_norm(self.mlp(self.post_attention_layernorm(x)))
