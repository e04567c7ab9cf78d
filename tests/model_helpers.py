"""What the model tests share: random small checkpoints, and a paged cache driven by hand."""

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from nanovllm.layers.attention import KVCache, SelfAttention
from nanovllm.layers.context import AttentionMetadata, PrefillMetadata, forward_context
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.layers.recurrent import RecurrentLayer
from nanovllm.layers.shared_kv import SharedKVAttention
from nanovllm.models import build_model, load_model_config, read_model_config
from nanovllm.models.model_config import ModelConfig
from nanovllm.weights.loader import load_weights

BLOCK_SIZE = 4


def make_checkpoint(folder, config: PretrainedConfig, seed: int = 0, max_shard_size: str = "40KB"):
    """Save a random model of `config` in several files; return it, in float32.

    Norms and biases are random too.
    """
    torch.manual_seed(seed)
    model = mended(AutoModelForCausalLM.from_config(config).eval())
    model.config._experts_implementation = "eager"  # another takes no odd sizes
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
            else:
                parameter.normal_(0.0, 0.15)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def mended(reference: PreTrainedModel) -> PreTrainedModel:
    """Have a model of transformers compute what its configuration says.

    Release 5.17 does not: its Gemma 2 caps no attention scores unless attention is "eager", and its
    gpt-oss ignores `swiglu_limit` and `swiglu_alpha`.
    """
    if getattr(reference.config, "attn_logit_softcapping", None) is not None:
        reference.set_attn_implementation("eager")
    for module in reference.modules():
        if hasattr(module, "limit") and hasattr(module, "alpha"):
            module.limit = getattr(reference.config, "swiglu_limit", module.limit)
            module.alpha = getattr(reference.config, "swiglu_alpha", module.alpha)
    return reference


def read_config(config: PretrainedConfig, **values) -> ModelConfig:
    """Our configuration of a model, from one of transformers and fields that differ."""
    return read_model_config(config.to_dict() | values)


def load(folder, rank: int = 0, size: int = 1):
    model = build_model(load_model_config(folder), ParallelGroup(rank, size))
    load_weights(model, folder)
    return model


def expected_logits(reference, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return reference(torch.tensor([tokens])).logits[0]


class Driver:
    """Runs a model's steps over a small paged cache, whose blocks lie in no order; sequences are
    numbered from 0.
    """

    def __init__(self, model, num_sequences: int, max_tokens: int):
        self.model = model
        width = -(-max_tokens // BLOCK_SIZE)
        blocks = num_sequences * width
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0))
        self.tables = order.view(num_sequences, width).int()
        self.lens = [0] * num_sequences
        for layer in model.modules():
            if isinstance(layer, SharedKVAttention):
                layer.kv_cache = layer.source.kv_cache
            elif isinstance(layer, SelfAttention):
                shape = (blocks, BLOCK_SIZE, layer.num_kv_heads, layer.head_dim)
                layer.kv_cache = KVCache(*torch.full((2, *shape), 1e3))
            if isinstance(layer, RecurrentLayer):
                shape = (num_sequences, *layer.state_shape)
                layer.state = torch.zeros(shape, dtype=layer.state_dtype)

    @torch.inference_mode()
    def step(self, decodes: dict[int, int], chunks: dict[int, list[int]]) -> torch.Tensor:
        """One token for each decoding sequence, then chunks of prompts -> the logits of all
        these tokens, in order.
        """
        tokens, positions, slots = [], [], []
        for i, new in [(i, [token]) for i, token in decodes.items()] + list(chunks.items()):
            for token in new:
                position = self.lens[i]
                tokens.append(token)
                positions.append(position)
                slots.append(
                    int(self.tables[i, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
                )
                self.lens[i] += 1
        prefill = None
        if chunks:
            len_q = torch.tensor([0] + [len(chunk) for chunk in chunks.values()])
            len_k = torch.tensor([0] + [self.lens[i] for i in chunks])
            cached = bool((len_q != len_k).any())
            prefill = PrefillMetadata(
                len_q.cumsum(0).int(),
                len_k.cumsum(0).int(),
                int(len_q.max()),
                int(len_k.max()),
                self.tables[list(chunks)] if cached else None,
            )
        meta = AttentionMetadata(
            torch.tensor(slots),
            len(decodes),
            torch.tensor([self.lens[i] for i in decodes], dtype=torch.int32),
            self.tables[list(decodes)],
            prefill=prefill,
            state_rows=torch.tensor([*decodes, *chunks]),
        )
        with forward_context(meta):
            return self.model.compute_logits(
                self.model(torch.tensor(tokens), torch.tensor(positions))
            )
