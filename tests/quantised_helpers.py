"""Packers of quantised checkpoints, written from what the makers of each format document.

A packer takes a weight [out, in] and returns the checkpoint's tensors, and the weight that these
stand for. Those of compressed-tensors ask that package for both.
"""

import json
import shutil
import threading

import pytest
import torch
from model_helpers import make_checkpoint, mended
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nanovllm.layers.parallel import ParallelGroup

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROJECTIONS += ("qkv_proj", "gate_up_proj")
HEAD = ("lm_head",)
SECONDS = 60


def tensors_of(folder):
    files = folder.glob("*.safetensors")
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def rewrite(folder, tensors):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def is_packed(name, left_plain=(), modules=PROJECTIONS):
    module, dot, kind = name.rpartition(".")
    is_projection = kind == "weight" and module.rpartition(".")[2] in modules
    return is_projection and not any(part in f"{module}." for part in left_plain)


def pack_checkpoint(plain, packed, pack, quantization_config, left_plain=(), modules=PROJECTIONS):
    """Make `packed`, a quantised copy of the folder `plain`, and let `plain` hold its weights."""
    shutil.copytree(plain, packed, dirs_exist_ok=True)
    of_packed, of_plain = {}, {}
    for name, tensor in tensors_of(plain).items():
        of_packed[name] = of_plain[name] = tensor.float()
        if is_packed(name, left_plain, modules):
            del of_packed[name]
            tensors, of_plain[name] = pack(tensor.float(), name)
            module = name.removesuffix(".weight")
            of_packed |= {f"{module}.{suffix}": x for suffix, x in tensors.items()}
    rewrite(packed, of_packed)
    rewrite(plain, of_plain)
    change_config(packed, quantization_config=quantization_config)


def make_pair(tmp_path, config, pack, quantization_config, seed=0, **which):
    """Save a random model twice: quantised, and with the weights that it stands for."""
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    make_checkpoint(plain, config, seed)
    pack_checkpoint(plain, packed, pack, quantization_config, **which)
    return plain, packed


def reference_of(folder, **options):
    options = dict(dtype=torch.float32, experts_implementation="eager") | options
    return mended(AutoModelForCausalLM.from_pretrained(folder, **options).eval())


def blocks(x, height, width):
    """Yield the blocks of a matrix, with their places among the blocks; the last may end short."""
    for i, rows in enumerate(x.split(height)):
        for j, block in enumerate(rows.split(width, dim=1)):
            yield (i, j), block


def fp8_blocks(height, width, dtype=torch.float32):
    def pack(weight, name):
        codes, plain = torch.empty_like(weight), torch.empty_like(weight)
        count = -(-weight.shape[0] // height), -(-weight.shape[1] // width)
        scales = torch.empty(count)
        places = zip(blocks(weight, height, width), blocks(codes, height, width))
        for (place, block), (_, code) in places:
            scales[place] = (block.abs().max() / 448).to(dtype)
            code.copy_((block / scales[place]).clamp(-448, 448).to(torch.float8_e4m3fn))
        for (place, code), (_, block) in zip(
            blocks(codes, height, width), blocks(plain, height, width)
        ):
            block.copy_(code * scales[place])
        codes = codes.to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": scales.to(dtype)}, plain

    return pack


def fp8_tensor(weight, name):
    """A scale of the weight and one of the inputs, which differs between projections."""
    tensors, plain = fp8_blocks(*weight.shape)(weight, name)
    scale = tensors["weight_scale_inv"].view(())
    return tensors | {
        "weight_scale_inv": scale,
        "activation_scale": torch.tensor(0.01 + len(name) / 1000),
    }, plain


def in_words(codes, order=range(8)):
    """Pack each eight codes of a row into a word: the one that `order` names first goes lowest."""
    words = torch.zeros(codes.shape[0], codes.shape[1] // len(order), dtype=torch.int64)
    for place, which in enumerate(order):
        words += codes[:, which :: len(order)].long() * 2 ** (place * (32 // len(order)))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def rounded_to_integers(weight, bits, group):
    """Round to integers with zero points: codes, scales and zeros of each group."""
    grouped = weight.unflatten(1, (-1, group))
    low, high = grouped.amin(dim=-1).clamp(max=0), grouped.amax(dim=-1).clamp(min=0)
    # What float16 holds, and no zero point of 0, which GPTQ cannot store less one.
    scales = ((high - low) / (2**bits - 2)).half().float()
    zeros = (-low / scales).round().clamp(1, 2**bits - 1)
    codes = (grouped / scales[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1)
    plain = ((codes - zeros[..., None]) * scales[..., None]).flatten(1)
    return codes.flatten(1), scales, zeros, plain


def gptq(bits, group, *, less_one=True, ordered=False):
    def pack(weight, name):
        count = weight.shape[1] if group == -1 else group
        order = torch.arange(weight.shape[1])
        if ordered:  # groups consist of columns from anywhere
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(len(name)))
        codes, scales, zeros, plain = rounded_to_integers(weight[:, order], bits, count)
        back = order.argsort()
        codes, plain = codes[:, back], plain[:, back]
        per_word = range(32 // bits)
        return {
            "qweight": in_words(codes, per_word).T,
            "qzeros": in_words((zeros - int(less_one)).T, per_word),
            "scales": scales.T.half(),
            "g_idx": (back // count).int(),
        }, plain

    return pack


def awq(group):
    def pack(weight, name):
        codes, scales, zeros, plain = rounded_to_integers(weight, 4, group)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {
            "qweight": in_words(codes.T, order),
            "qzeros": in_words(zeros.T, order),
            "scales": scales.T.half(),
        }, plain

    return pack


def compressed(kind, weights, inputs=None, static_input=None):
    """Return a packer that asks compressed-tensors, and the quantization_config for it.

    Only tests that pack a weight need the package. Without it, they are skipped.
    """

    def pack(weight, name):
        pytest.importorskip("compressed_tensors")
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.lifecycle.forward import dequantize
        from compressed_tensors.quantization.utils import calculate_qparams

        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
        args, compressor = scheme.weights, BaseCompressor.get_value_from_registry(kind)
        columns = weight.shape[1]
        height, width = {
            "tensor": weight.shape,
            "channel": (1, columns),
            "group": (1, weights.get("group_size")),
            "tensor_group": (1, 16),
            "block": weights.get("block_structure"),
        }[weights["strategy"]]
        count = -(-weight.shape[0] // height), -(-columns // width)
        low, high = torch.empty(count), torch.empty(count)
        for place, block in blocks(weight, height, width):
            low[place], high[place] = block.min(), block.max()
        state = {"weight": weight}
        if kind.startswith("nvfp4"):
            state["weight_global_scale"] = (448 * 6 / weight.abs().max()).view(1)
        scales, zeros = calculate_qparams(low, high, args, state.get("weight_global_scale"))
        state |= {"weight_scale": scales, "weight_zero_point": zeros.to(torch.int8)}
        if weights.get("actorder") == "group":
            generator = torch.Generator().manual_seed(len(name))
            order = torch.randperm(columns, generator=generator)
            state["weight"] = weight[:, order]
        if weights["strategy"] == "tensor":
            state["weight_scale"] = scales.view(1)
            state["weight_zero_point"] = zeros.view(1)
        if kind == "float-quantized":
            del state["weight_zero_point"]
        tensors = compressor.compress(state, scheme)
        plain = compressor.decompress(tensors, scheme)["weight"].float()
        if kind.startswith("nvfp4"):  # their own decompress rounds to bfloat16
            codes = unpack_fp4_from_uint8(tensors["weight_packed"], *weight.shape, torch.float32)
            plain = dequantize(
                codes,
                tensors["weight_scale"].float(),
                args=args,
                global_scale=tensors["weight_global_scale"],
            )
        if static_input is not None:
            tensors["input_scale"] = torch.tensor([static_input])
        tensors.pop("weight_zero_point") if args.symmetric and "weight_zero_point" in tensors else 0
        return {suffix: x for suffix, x in tensors.items()}, plain

    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    return pack, config


class ThreadGroup(ParallelGroup):
    """Ranks that are threads of this process and meet at a barrier."""

    meeting = None

    def all_reduce(self, x):
        return self._meet(x, sum)

    def maximum(self, x):
        return self._meet(x, lambda slots: torch.stack(slots).amax(dim=0))

    def _meet(self, x, join):
        barrier, slots = self.meeting
        slots[self.rank] = x.clone()
        barrier.wait()
        result = join(slots)
        barrier.wait()  # none may write its slot again before all have read
        return result


def on_ranks(size, run):
    """Call run(group) in a thread for each rank, and return what they return."""
    meeting = threading.Barrier(size, timeout=SECONDS), [None] * size
    results, errors = [None] * size, []

    def of_rank(rank):
        group = ThreadGroup(rank, size)
        object.__setattr__(group, "meeting", meeting)
        try:
            results[rank] = run(group)
        except Exception as error:
            errors.append(error)
            meeting[0].abort()

    threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    if errors:
        raise errors[0]
    return results
