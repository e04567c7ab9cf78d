"""The layers with a state of fixed size, by transformers' modules and by their recurrences."""

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from nanovllm.layers import gated_delta, short_conv
from nanovllm.layers.context import AttentionMetadata, PrefillMetadata, forward_context
from nanovllm.layers.gated_delta import GatedDeltaNet
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.layers.recurrent import RecurrentLayer

ROWS = 5  # of state; the rows of sequences lie among rows that nobody may touch


def rule_by_definition(q, k, v, g, beta, s):
    """The delta rule of one sequence, token by token, as the module's page says it."""
    repeats = v.shape[1] // k.shape[1]
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(repeats, dim=1) for x in (q / q.shape[-1] ** 0.5, k))
    out = []
    for t in range(len(q)):
        s = s * g[t].exp()[:, None, None]
        change = beta[t][:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], s))
        s = s + k[t][:, :, None] * change[:, None, :]
        out.append(torch.einsum("hk,hkv->hv", q[t], s))
    return torch.stack(out), s


def random_inputs(tokens, key_heads, value_heads, key_dim, value_dim, dtype=torch.float64):
    generator = torch.Generator().manual_seed(tokens)

    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    q, k = noise(2, tokens, key_heads, key_dim)
    v = noise(tokens, value_heads, value_dim)
    # Decays from none to such that exp of a block's sum underflows.
    g = -F.softplus(noise(tokens, value_heads) * 3) * 4
    return q, k, v, g, noise(tokens, value_heads).sigmoid()


@pytest.mark.parametrize("heads", [(1, 1), (2, 4), (3, 9), (5, 5)], ids=str)
@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-12), (torch.float32, 2e-5)], ids=str)
def test_chunks_and_tokens_of_the_delta_rule_equal_its_recurrence(heads, dtype, atol):
    inputs = random_inputs(330, *heads, 8, 12)
    lengths = {3: 1, 0: 200, 4: 64, 1: 65}  # row -> tokens, packed in this order
    state = torch.randn(ROWS, heads[1], 8, 12, dtype=torch.float64)
    before, got = state.clone(), state.to(dtype)
    starts = torch.tensor([0, *lengths.values()]).cumsum(0).int()
    rows = torch.tensor(list(lengths))
    ours = [x.to(dtype) for x in inputs]
    out = gated_delta.delta_rule_chunks(*ours, got, rows, starts)
    for i, row in enumerate(lengths):
        part = slice(int(starts[i]), int(starts[i + 1]))
        want, state[row] = rule_by_definition(*[x[part] for x in inputs], before[row])
        torch.testing.assert_close(out[part], want.to(dtype), rtol=0, atol=atol)
    torch.testing.assert_close(got, state.to(dtype), rtol=0, atol=atol)

    before = state.clone()
    ours, theirs = ([x[-4:] for x in of] for of in (ours, inputs))
    out = gated_delta.delta_rule_token(*ours, got, rows)
    for i, row in enumerate(lengths):
        want, state[row] = rule_by_definition(*[x[i : i + 1] for x in theirs], before[row])
        torch.testing.assert_close(out[i], want[0].to(dtype), rtol=0, atol=atol)
    torch.testing.assert_close(got, state.to(dtype), rtol=0, atol=atol)


def test_after_30000_tokens_a_prompt_and_decoded_tokens_leave_the_same_state():
    """In float32, with gates so slow that the state holds thousands of tokens."""
    count, step = 30_000, 2_048
    q, k, v, g, beta = (x.float() for x in random_inputs(count, 1, 2, 8, 8))
    inputs = q, k, v, g / 4000, beta
    state, rows = torch.zeros(2, 2, 8, 8), torch.tensor([1])
    decoded = torch.cat(
        [
            gated_delta.delta_rule_token(*(x[i : i + 1] for x in inputs), state, rows)
            for i in range(count)
        ]
    )
    after, state = state, torch.zeros_like(state)
    for begin in range(0, count, step):
        part = [x[begin : begin + step] for x in inputs]
        starts = torch.tensor([0, len(part[0])], dtype=torch.int32)
        out = gated_delta.delta_rule_chunks(*part, state, rows, starts)
    assert out.std() > 0.1
    torch.testing.assert_close(out, decoded[-len(out) :], rtol=0, atol=1e-5)
    torch.testing.assert_close(state, after, rtol=0, atol=1e-5)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 6, dtype=torch.float64)], ids=str)
def test_a_convolution_in_pieces_equals_the_whole_one(width, bias):
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(3, 20, 6, generator=generator, dtype=torch.float64)
    weight = torch.randn(6, width, generator=generator, dtype=torch.float64)
    padded = F.pad(x.mT, (width - 1, 0))
    want = F.conv1d(padded, weight.unsqueeze(1), bias, groups=6).mT
    state = torch.zeros(ROWS, width - 1, 6, dtype=torch.float64)
    state[[0, 2]] = 7.0  # rows of others
    rows, done, outs = [4, 1, 3], [0, 0, 0], [[], [], []]
    # Pieces shorter than the width must carry inputs of the pieces before them.
    for pieces in ({0: 5, 1: 1}, {2: 2, 1: 1, 0: 3}, {0: 1, 1: 4, 2: 1}, {1: 14, 2: 17, 0: 11}):
        parts = [x[i, done[i] : done[i] + n] for i, n in pieces.items()]
        starts = torch.tensor([0, *pieces.values()]).cumsum(0).int()
        of = torch.tensor([rows[i] for i in pieces])
        if set(pieces.values()) == {1}:
            out = short_conv.convolve_token(torch.cat(parts), weight, bias, state, of)
        else:
            out = short_conv.convolve_chunks(torch.cat(parts), weight, bias, state, of, starts)
        for (i, n), part in zip(pieces.items(), out.split(list(pieces.values()))):
            outs[i].append(part)
            done[i] += n
    assert done == [20, 20, 20]
    for i in range(3):
        torch.testing.assert_close(torch.cat(outs[i]), want[i])
        torch.testing.assert_close(state[rows[i]], x[i, 20 - width + 1 :])
    assert (state[[0, 2]] == 7.0).all()


SIZES = dict(
    hidden_size=20,
    num_hidden_layers=1,
    layer_types=["linear_attention"],
    linear_key_head_dim=8,
    linear_value_head_dim=6,
)


def delta_net(config, group=ParallelGroup(), grouped=False):
    """A layer with the sizes of `config`, and zeroed state."""
    layer = GatedDeltaNet(
        config.hidden_size,
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        group,
        conv_width=config.linear_conv_kernel_dim,
        eps=config.rms_norm_eps,
        grouped=grouped,
    )
    for module in layer.modules():
        if isinstance(module, RecurrentLayer):
            module.state = torch.zeros(ROWS, *module.state_shape, dtype=module.state_dtype)
    return layer


def fill(layer, reference):
    tensors = {f"x.{name}": tensor for name, tensor in reference.state_dict().items()}
    filled = 0
    for path, module in layer.named_modules(prefix="x"):
        if not hasattr(module, "weight_slices"):
            continue
        for part in module.weight_slices(path):
            assert tensors[part.name].shape == part.shape, part.name
            part.destination.copy_(tensors[part.name][part.index])
            filled += part.destination.numel()
    assert filled == sum(parameter.numel() for parameter in layer.parameters())


def metadata(decodes, lengths):
    """A step of one-token sequences in rows `decodes` and chunks {row: length}."""
    prefill = None
    if lengths:
        starts = torch.tensor([0, *lengths.values()]).cumsum(0).int()
        prefill = PrefillMetadata(starts, starts, max(lengths.values()), 0, None)
    rows = torch.tensor([*decodes, *lengths])
    return AttentionMetadata(torch.zeros(0), len(decodes), prefill=prefill, state_rows=rows)


class AllReduce(ParallelGroup):
    """A rank that keeps its part of a sum; the test adds the parts."""

    def all_reduce(self, x):
        return x


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("heads", [(4, 4), (2, 8), (4, 12), (1, 4)], ids=str)
@pytest.mark.parametrize(
    "config_class, theirs, grouped",
    [
        (Qwen3_5TextConfig, Qwen3_5GatedDeltaNet, False),
        (Qwen3NextConfig, Qwen3NextGatedDeltaNet, True),
    ],
)
@torch.inference_mode()
def test_a_layer_equals_transformers_on_any_number_of_ranks(
    config_class, theirs, grouped, heads, ranks
):
    config = config_class(**SIZES, linear_num_key_heads=heads[0], linear_num_value_heads=heads[1])
    torch.manual_seed(heads[1])
    reference = theirs(config, 0).eval()
    for parameter in reference.parameters():
        parameter.normal_(0.0, 0.3)
    x = torch.randn(2, 90, 20)
    want = reference(x)
    got = torch.zeros_like(want)
    for rank in range(ranks):
        layer = delta_net(config, AllReduce(rank, ranks), grouped)
        fill(layer, reference)
        outs = [[], []]
        # Row 3 computes sequence 0, row 1 sequence 1: chunks, tokens beside chunks, tokens.
        for decodes, lengths in (([], {3: 70, 1: 2}), ([3], {1: 67}), ([1, 3], {}), ([1, 3], {})):
            pieces = [(row, 1) for row in decodes] + list(lengths.items())
            parts = []
            for row, count in pieces:
                sequence = 0 if row == 3 else 1
                begin = sum(len(out) for out in outs[sequence])
                parts.append(x[sequence, begin : begin + count])
            with forward_context(metadata(decodes, lengths)):
                out = layer(torch.cat(parts), torch.zeros(0))
            for (row, _), part in zip(pieces, out.split([count for _, count in pieces])):
                outs[0 if row == 3 else 1].append(part)
        for i in range(2):
            whole = torch.cat(outs[i])
            got[i, : len(whole)] += whole
    lengths = [len(torch.cat(out)) for out in outs]
    assert lengths == [73, 71]
    for i, length in enumerate(lengths):
        torch.testing.assert_close(got[i, :length], want[i, :length], rtol=1e-4, atol=3e-5)


def test_padded_rows_of_a_decode_step_change_no_other_row():
    inputs = random_inputs(4, 2, 4, 8, 12, torch.float32)
    for x in inputs:
        x[2:] = torch.nan  # two rows of padding
    state = torch.randn(ROWS, 4, 8, 12)
    rows = torch.tensor([2, 0, 4, 4])
    alone = state.clone()
    want = gated_delta.delta_rule_token(*[x[:2] for x in inputs], alone, rows[:2])
    got = gated_delta.delta_rule_token(*inputs, state, rows)
    torch.testing.assert_close(got[:2], want)
    torch.testing.assert_close(state[:4], alone[:4])
