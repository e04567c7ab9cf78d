"""From a model's name to filled parameters: find the folder, read its configuration, read its weights.

Knows files and the Hugging Face hub. Knows nothing about architectures: each layer says, by `weight_slices`, which part of
which checkpoint tensor it holds, and the loader reads exactly that, straight into the parameter. It ends with a proof:
every element of every parameter was filled once, and every tensor of the checkpoint was used.
"""

import json
import os
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from nanovllm.weights.weight_slice import WeightSlice

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# transformers and huggingface_hub take seconds to import, and the ranks of tensor parallelism need neither: they are
# imported where they are used.

INDEX = "model.safetensors.index.json"
DOWNLOADS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer*"]
NOT_DOWNLOADED = ["*/*", "consolidated*"]  # other formats of the same weights
FLOATS = ("F64", "F32", "F16", "BF16")
# What models read of a configuration, by type; OF_EXPERTS where there are experts. Qwen3's files hold all of it.
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings",
)  # fmt: skip
COUNTS = (*SIZES, "head_dim")
FLAGS = ("tie_word_embeddings", "attention_bias", "use_sliding_window")
OTHERS = ("architectures", "rms_norm_eps", "hidden_act", "sliding_window")
OF_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")
READERS = 8  # threads: one fills the bus from cached files, but leaves a disk idle between its reads


def resolve_model_folder(model: str) -> Path:
    """The folder of `model`: itself if it is one, else a download of the hub's repository of that name."""
    folder = Path(model).expanduser()
    if os.path.isdir(folder):  # which a name too long is not
        return folder
    if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise ValueError(f"model is {model!r}: there is no such folder, nor is it a hub id like Qwen/Qwen3-0.6B")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(model, allow_patterns=DOWNLOADS, ignore_patterns=NOT_DOWNLOADED))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise ValueError(
            f"model is {model!r}, neither a folder here nor to be had from the Hugging Face hub: check the name, "
            f"the network and your access to it, or give a folder ({type(error).__name__}: {error})"
        ) from error


def load_hf_config(folder: str | Path) -> "PretrainedConfig | SimpleNamespace":
    """What config.json says. Transformers, which takes seconds to import, adds its defaults where that is not all."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json: give the folder of a Hugging Face model")
    with suppress(ValueError, AttributeError):  # transformers will say what is wrong
        values = json.loads(path.read_text())
        if says_all(values):
            return SimpleNamespace(**values)
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

    try:
        values, _ = PretrainedConfig.get_config_dict(folder)
        if values.get("model_type", "") not in ("", *CONFIG_MAPPING):
            return PretrainedConfig.from_dict(values)  # nobody knows it: whoever builds models says which ones run
        return AutoConfig.from_pretrained(folder)
    except Exception as error:  # every release raises other ones
        raise ValueError(f"{folder}/config.json cannot be read: {error}") from error


def says_all(values: dict[str, Any]) -> bool:
    """Whether models find all that they read among a configuration's values, so that no default is needed."""
    counts, others = COUNTS, OTHERS
    if "moe" in f"{values.get('model_type')} {values.get('architectures')}".lower():
        counts, others = COUNTS + OF_EXPERTS, (*OTHERS, "norm_topk_prob", "mlp_only_layers")
    rope = values.get("rope_parameters") or values  # newer transformers' form, or the older one
    return (
        all(type(values.get(name)) is int for name in counts)
        and all(type(values.get(name)) is bool for name in FLAGS)
        and all(name in values for name in others)
        and type(rope.get("rope_theta")) in (int, float)
        and values.get("rope_scaling") is None
        and rope.get("rope_type", "default") == "default"
    )


def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Fill `model` from the safetensors files of `folder`, each tensor converted to its parameter's dtype."""
    sources = list(model_weight_slices(model))
    check_coverage(model, sources)
    checkpoint = open_checkpoint(Path(folder))
    needed = {source.name for source in sources}
    if missing := needed - checkpoint.keys():
        raise ValueError(f"{folder}: no file has {_some(missing)}: download the model again, or check its config.json")
    extra = {name for name in checkpoint.keys() - needed if not name.endswith("rotary_emb.inv_freq")}
    if extra := extra - tied_heads(model):
        raise ValueError(f"{folder}: the model has no place for {_some(extra)}: check its config.json")
    for source in sources:
        check_tensor(source, *checkpoint[source.name])

    @torch.inference_mode()  # a thread starts outside it, and parameters may have been made inside
    def read(source: WeightSlice) -> None:
        _, file = checkpoint[source.name]
        source.destination.copy_(file.get_slice(source.name)[source.index])

    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(read, sources))  # a list, for the first error to be raised


def init_dummy_weights(model: nn.Module, seed: int = 0) -> None:
    """Fill `model` with normal noise of deviation 0.02, and norms with ones.

    The noise of a checkpoint tensor is a function of the seed and its name: any number of ranks has the same model.
    """
    sources = list(model_weight_slices(model))
    check_coverage(model, sources)
    for source in sources:
        destination = source.destination
        if source.name.endswith("norm.weight"):
            destination.fill_(1.0)
            continue
        generator = torch.Generator(destination.device).manual_seed(zlib.crc32(f"{seed} {source.name}".encode()))
        if destination.shape == source.shape:
            destination.normal_(0.0, 0.02, generator=generator)
        else:
            whole = torch.empty(source.shape, dtype=destination.dtype, device=destination.device)
            destination.copy_(whole.normal_(0.0, 0.02, generator=generator)[source.index])


def model_weight_slices(model: nn.Module) -> Iterator[WeightSlice]:
    for path, module in model.named_modules():
        if hasattr(module, "weight_slices"):
            yield from module.weight_slices(path)


def tied_heads(model: nn.Module) -> set[str]:
    """Tensors a checkpoint may hold although the model takes them from another."""
    return {f"{path}.weight" for path, module in model.named_modules() if getattr(module, "tied", False)}


def check_coverage(model: nn.Module, sources: Iterable[WeightSlice]) -> None:
    """The sources' destinations, laid end to end, are the model's parameters: no gap and no overlap."""
    ends = {}
    for source in sources:
        begin = source.destination.data_ptr()
        assert source.destination.is_contiguous() and begin not in ends, source.name
        ends[begin] = begin + source.destination.nbytes
    for name, parameter in model.named_parameters():
        at, end = parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes
        while at < end:
            assert at in ends, f"no source fills {name} from byte {at - parameter.data_ptr()}"
            at = ends.pop(at)
        assert at == end, f"a source reaches past the end of {name}"
    assert not ends, f"{len(ends)} sources fill no parameter"


def open_checkpoint(folder: Path) -> dict[str, tuple[Path, safe_open]]:
    """Each tensor's name -> its file. Reads the files' headers alone."""
    checkpoint = {}
    for path in checkpoint_files(folder):
        try:
            file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is truncated or corrupt: download it again ({error})") from error
        for name in file.keys():
            if name in checkpoint:
                raise ValueError(f"{path} and {checkpoint[name][0]} both have {name}: remove the wrong one")
            checkpoint[name] = path, file
    return checkpoint


def checkpoint_files(folder: Path) -> list[Path]:
    """The files that the index names; without an index, all safetensors files there are."""
    index = folder / INDEX
    if not index.is_file():
        if files := sorted(folder.glob("*.safetensors")):
            return files
        raise ValueError(f"{folder} has no *.safetensors file: download the model again, or convert its weights")
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        missing = {name for name in names if not (folder / name).is_file()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index} is corrupt: download it again ({error})") from error
    if missing:
        raise ValueError(f"{folder} lacks {_some(missing)}, which {INDEX} names: download the model again")
    return [folder / name for name in sorted(names)]


def check_tensor(source: WeightSlice, path: Path, file: safe_open) -> None:
    found = file.get_slice(source.name)
    if (shape := tuple(found.get_shape())) != source.shape:
        raise ValueError(f"{path}: {source.name} has shape {shape}, config.json means {source.shape}: check both")
    if (dtype := found.get_dtype()) not in FLOATS:
        raise ValueError(f"{path}: {source.name} is {dtype}, not one of {FLOATS}: choose the unquantized checkpoint")


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
