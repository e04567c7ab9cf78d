"""Batch invariance: a request's results do not depend, to the bit, on what runs beside it.

`LLM(batch_invariant=True)` chooses here:

- products of linear layers that sum in the order of inputs, whatever the number of rows:
  triton/invariant_linear.py;
- products of linear layers in FP8, and of packed experts, in tiles that sum in one order;
- attention that cuts a context at fixed places, for prompts and for decoding alike:
  triton/invariant_attention.py;
- sums over two ranks, rounded once: a sum of two numbers has one result, by whatever kernel of NCCL
  or of symmetric memory, while a sum of more would depend on the order, which NCCL chooses by the
  size of the tensor;
- log-probabilities of prompts by the kernels that compute those of sampled tokens.

Norms, rotary embeddings, activations, embeddings and the sampler compute each row by itself in any
case. A layer of another class is refused: nobody has shown that it computes rows so.
"""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.backends.cuda.attention_backends import AttentionBackend
from nanovllm.backends.cuda.fused_fp8 import FusedFp8Weight
from nanovllm.backends.cuda.fused_layers import (
    ROTARIES,
    FusedConvolutionLayer,
    FusedDecoder,
    FusedDecoderLayer,
    FusedGatedMLP,
    FusedGraniteLayer,
    FusedLinear,
    FusedLMHead,
    FusedMixtureOfExperts,
    FusedPostNormLayer,
    FusedRMSNorm,
    FusedRowParallelLinear,
    FusedSandwichNormLayer,
    FusedSelfAttention,
    FusedShardedRMSNorm,
    FusedZeroCenteredRMSNorm,
)
from nanovllm.backends.cuda.fused_quantised import FusedQuantised, packed_experts
from nanovllm.backends.cuda.fused_recurrent import FusedGatedConvolution
from nanovllm.backends.cuda.triton import fp8_linear
from nanovllm.backends.cuda.triton import resampler as kernels
from nanovllm.backends.cuda.triton.dispatch import MAX_ROWS
from nanovllm.backends.cuda.triton.invariant_attention import decode_attention, prefill_attention
from nanovllm.backends.cuda.triton.invariant_linear import approve_cublas
from nanovllm.backends.cuda.triton.moe_packed import PackedExperts
from nanovllm.backends.quantised.layers import Quantised, QuantisedExperts
from nanovllm.backends.quantised.packed import PackedWeight
from nanovllm.layers.embedding import ScaledEmbedding, VocabParallelEmbedding
from nanovllm.layers.gated_delta import GatedDeltaNet
from nanovllm.layers.moe import Experts
from nanovllm.layers.short_conv import ShortConvolution
from nanovllm.models.gpt_oss import GptOssExperts
from nanovllm.models.transformer import CausalLM

# Classes of layers that compute each token by itself, or with the kernels that are chosen here.
ROW_INVARIANT = {
    FusedDecoder,
    FusedDecoderLayer,
    FusedGraniteLayer,
    FusedSandwichNormLayer,
    FusedPostNormLayer,
    FusedConvolutionLayer,
    FusedSelfAttention,
    FusedGatedConvolution,
    ShortConvolution,
    FusedGatedMLP,
    FusedMixtureOfExperts,
    Experts,
    GptOssExperts,
    FusedRMSNorm,
    FusedZeroCenteredRMSNorm,
    FusedShardedRMSNorm,
    FusedLMHead,
    VocabParallelEmbedding,
    ScaledEmbedding,
    *ROTARIES,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Identity,
}
LINEAR = (FusedLinear, FusedRowParallelLinear, FusedLMHead)


def invariant_attention() -> AttentionBackend:
    """Return the attention whose results do not depend on the batch."""
    return AttentionBackend(
        "Triton, batch-invariant", prefill_attention, decode_attention, takes_tiles=True
    )


def check_model(model: CausalLM, dtype: torch.dtype) -> None:
    """Raise ValueError for a fused model that has a layer whose results depend on the batch."""
    remedy = "use another model, or leave the option out"
    if dtype != torch.bfloat16:
        raise ValueError(
            f"batch_invariant is True, but dtype is {str(dtype).removeprefix('torch.')!r}: use "
            "'bfloat16', or leave the option out"
        )
    for name, module in model.named_modules():
        if isinstance(module, GatedDeltaNet):
            raise ValueError(
                f"batch_invariant is True, but layer {name} is of class GatedDeltaNet, which "
                f"computes a token within a prompt by other sums than one by itself: {remedy}"
            )
    for name, module in reversed(list(model.named_modules())):  # parts before wholes
        if not is_row_invariant(module):
            kind = type(module).__name__.removeprefix("Fused")
            if isinstance(module, Quantised):
                weight: Any = next(iter(module.packed.values()))
                kind += f" with {weight.scheme.description}"
                remedy = "use weights in bfloat16, or leave the option out"
            raise ValueError(
                f"batch_invariant is True, but layer {name} is of class {kind}, whose results "
                f"may depend on the batch: {remedy}"
            )
    for name, module in model.named_modules():
        if isinstance(module, LINEAR) and not isinstance(module, FusedQuantised):
            width = module.weight.shape[1]
            if width % 8:
                raise ValueError(
                    f"batch_invariant is True, but layer {name} has {width} inputs, which is no "
                    f"multiple of 8: {remedy}"
                )


def is_row_invariant(module: nn.Module) -> bool:
    """Tell whether a layer's kernels compute each token alike in any batch.

    A packed weight is judged with the layer that it belongs to.
    """
    if isinstance(module, FusedShardedRMSNorm):
        # For several ranks, PyTorch sums a row's squares, in an order that may depend on the rows.
        return module.group.size == 1
    if isinstance(module, FusedQuantised):
        weight = module.packed["weight"]
        # The kernels for integers sum in an order that depends on the number of rows.
        return isinstance(weight, FusedFp8Weight) and all(
            fp8_linear.is_known(matrix) for matrix in weight.matrices(None)
        )
    if isinstance(module, QuantisedExperts):
        # Woven experts are multiplied by other tiles for other numbers of tokens.
        weights = module.packed.values()
        return all(isinstance(packed_experts(weight), PackedExperts) for weight in weights)
    return type(module) in ROW_INVARIANT or isinstance(module, (*LINEAR, CausalLM, PackedWeight))


def warmup_products(model: CausalLM) -> None:
    """Launch the kernels that multiply the rows of prompts."""
    like = model.model.embed_tokens.weight
    layers: list[Any] = [
        x for x in model.modules() if isinstance(x, (FusedLinear, FusedRowParallelLinear))
    ]
    for layer in {(type(layer), layer.weight.shape): layer for layer in layers}.values():
        for rows in (MAX_ROWS + 1, 8192):
            layer.product(like.new_zeros(rows, layer.weight.shape[1]), layer.bias)


def approve_products(model: nn.Module, sizes: Iterable[int]) -> None:
    """Let products of these numbers of rows use cuBLAS where it computes the same bits.

    The products of all other numbers of rows use the kernels of triton/invariant_linear.py.
    """
    weights = [
        module.weight
        for module in model.modules()
        if isinstance(module, LINEAR) and not isinstance(module, FusedQuantised)
    ]
    for weight in {weight.shape: weight for weight in weights}.values():
        for size in sizes:
            approve_cublas(weight, size)
    torch.cuda.empty_cache()


def make_prompt_records(logits: Tensor, token_ids: Tensor, most: int) -> Tensor:
    """Make records as make_records does, by the kernels that make those of sampled tokens."""
    rows, device = len(logits), logits.device
    slots = torch.zeros(rows, dtype=torch.int64, device=device)
    # One batch slot, which asks for `most` likeliest tokens. The kernels read no other limit.
    limits = torch.full((1, kernels.COLUMNS.value), most, dtype=torch.int32, device=device)
    asked: Any = SimpleNamespace(limits=limits)
    return kernels.logprobs(
        logits,
        torch.arange(rows, device=device),
        SimpleNamespace(slots=slots, tokens=token_ids),
        slot_params=asked,
        most=most,
        workspace=kernels.Workspace(rows, logits.shape[1], device),
    )
