"""The loader that fills a model's parameters, from a checkpoint's safetensors files or with noise.

The loader knows files of weights and nothing about architectures. Each layer says by
`weight_slices` which part of which checkpoint tensor it holds, and the loader reads exactly that
part, straight into the parameter. Loading includes a proof: every element of every parameter is
filled once, and every tensor of the checkpoint is used.
"""

import logging
import math
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from nanovllm.weights import mxfp4
from nanovllm.weights.fused_experts import split_experts
from nanovllm.weights.model_files import TO_SAFETENSORS, read_json
from nanovllm.weights.weight_slice import WeightSlice, are_finite

logger = logging.getLogger("nanovllm")

INDEX = "model.safetensors.index.json"
# Threads that read. One thread is enough for files in the page cache, but leaves a disk idle
# between its reads.
READERS = 8
COMPARED_ROWS = 8192  # rows of two tensors that are compared at a time

# Name of a tensor -> the file that has it, and the tensor, whose values are read on demand.
Checkpoint = dict[str, tuple[Path, Any]]


def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Fill `model` from the safetensors files of `folder`. Tensors take their parameters' dtype.

    Raises ValueError if the checkpoint is broken, belongs to another model, or has NaN or infinite
    numbers where they concern all tokens.
    """
    checkpoint = open_checkpoint(Path(folder))
    if any(name.endswith("_blocks") for name in checkpoint):
        read_packed = {part.name for part in model_weight_slices(model)}
        checkpoint = mxfp4.join_blocks(checkpoint, kept=read_packed)
    if not getattr(model, "stacks_experts", False):
        split_experts(checkpoint)
    with ThreadPoolExecutor(READERS) as pool:
        # In a forked process, the first thread that asks for the number of threads replaces a pool
        # of PyTorch's. If two do so at the same time, one of them finds none, and raises.
        pool.submit(torch.get_num_threads).result()
        untie_heads(model, checkpoint, pool)
        slices = list(model_weight_slices(model))
        check_coverage(model, slices)
        check_checkpoint(model, slices, checkpoint, folder)

        # Parameters may have been made in inference mode, and a new thread does not run in it.
        @torch.inference_mode()
        def read(part: WeightSlice) -> None:
            if part.default is not None and part.name not in checkpoint:
                part.destination.fill_(part.default)
                return
            path, tensor = checkpoint[part.name]
            values = tensor[part.index]
            if part.must_be_finite and not are_finite(values):
                raise ValueError(
                    f"{path}: {part.name} has NaN or infinite numbers: download the model again, "
                    "or choose another checkpoint of it"
                )
            try:
                part.fill(values)
            except ValueError as error:
                raise ValueError(
                    f"{path}: {part.name} {error}: check its config.json, or download the model "
                    "again"
                ) from error

        list(pool.map(read, slices))  # the list raises the first error


def init_dummy_weights(model: nn.Module, seed: int = 0) -> None:
    """Fill `model` with normal noise of standard deviation 0.02, and its norms with ones.

    The noise of a checkpoint tensor is a function of the seed and the tensor's name, so the model
    is the same on any number of ranks.
    """
    slices = list(model_weight_slices(model))
    check_coverage(model, slices)
    parts_of: dict[str, list[WeightSlice]] = {}
    for part in slices:
        parts_of.setdefault(part.name, []).append(part)
    for name, parts in parts_of.items():
        destination, shape, convert = parts[0].destination, parts[0].shape, parts[0].convert
        default = 1.0 if name.endswith("norm.weight") else parts[0].default
        if default is not None:
            destination.fill_(default)
            continue
        generator = torch.Generator(destination.device).manual_seed(
            zlib.crc32(f"{seed} {name}".encode())
        )
        is_whole = destination.shape == shape and destination.is_contiguous()
        if convert is None and is_whole and len(parts) == 1:
            destination.normal_(0.0, 0.02, generator=generator)
            continue
        dtype = destination.dtype if convert is None else torch.float32
        whole = torch.empty(shape, dtype=dtype, device=destination.device)
        whole.normal_(0.0, 0.02, generator=generator)
        for part in parts:
            part.fill(whole[part.index])


def model_weight_slices(model: nn.Module) -> Iterator[WeightSlice]:
    """Yield the weight slices of all layers, with the checkpoint's names."""
    for path, module in model.named_modules():
        if hasattr(module, "weight_slices"):
            yield from module.weight_slices(checkpoint_name(model, path))


def take_plain_weights(model: nn.Module) -> None:
    """Let the quantised layers of an empty model make their weights of plain ones."""
    for module in model.modules():
        if "reads_plain" in vars(module):
            vars(module)["reads_plain"] = True


def checkpoint_name(model: nn.Module | type[nn.Module], path: str) -> str:
    """Return the name that a checkpoint has for the module at `path`.

    Parts of the path may have other names in the checkpoint.
    """
    names = getattr(model, "checkpoint_names", {})
    return ".".join(names.get(part, part) for part in path.split("."))


def check_coverage(model: nn.Module, slices: Iterable[WeightSlice]) -> None:
    """Assert that the slices fill each parameter of the model, without a gap or an overlap."""
    ends = {}
    for part in slices:
        begin = part.destination.data_ptr()
        assert is_dense(part.destination) and begin not in ends, part.name
        ends[begin] = begin + part.destination.nbytes
    for name, parameter in model.named_parameters():
        at, end = parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes
        while at < end:
            assert at in ends, f"no weight slice fills {name} from byte {at - parameter.data_ptr()}"
            at = ends.pop(at)
        assert at == end, f"a weight slice reaches past the end of {name}"
    assert not ends, f"{len(ends)} weight slices fill no parameter"


def is_dense(x: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill its memory, in any order of the dimensions."""
    return x.permute(sorted(range(x.dim()), key=x.stride, reverse=True)).is_contiguous()


def check_checkpoint(
    model: nn.Module, slices: list[WeightSlice], checkpoint: Checkpoint, folder: str | Path
) -> None:
    """Raise ValueError unless the checkpoint has the tensors of the slices, and no others.

    It may lack those for which there is a default.
    """
    slices = [part for part in slices if part.default is None or part.name in checkpoint]
    needed = {part.name for part in slices}
    unread = ("rotary_emb.inv_freq", *getattr(model, "unread_suffixes", ()))
    extra = {name for name in checkpoint.keys() - needed if not name.endswith(unread)}
    extra -= {f"{checkpoint_name(model, path)}.weight" for path, _ in tied_heads(model)}
    extra -= set(left_out(model, checkpoint))
    if missing := needed - checkpoint.keys():
        remedy = "download the model again, or check its config.json"
        remedy = about_quantised(model, extra, needed, folder) or remedy
        raise ValueError(f"{folder}: no file has {some_of(missing)}: {remedy}")
    if extra := extra - check_unread(model, checkpoint):
        remedy = about_quantised(model, extra, needed, folder) or "check its config.json"
        raise ValueError(f"{folder}: the model has no place for {some_of(extra)}: {remedy}")
    for part in slices:
        check_tensor(part, *checkpoint[part.name])


def about_quantised(model: nn.Module, extra: set[str], needed: set[str], folder: str | Path) -> str:
    """Say what to do about weights that are quantised where the model's layers are not.

    extra: The tensors for which the model has no place.
    needed: Those that it has places for.
    Returns "" if there are no such weights.
    """
    ends = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv")
    packed = [name for name in extra if name.endswith(ends)]
    if not (packed := [name for name in packed if f"{name.rpartition('.')[0]}.weight" in needed]):
        return ""
    if (Path(folder) / "hf_quant_config.json").is_file():
        return (
            "the model is quantised by ModelOpt, as hf_quant_config.json says, whose formats are "
            "not run here; choose another checkpoint of the model"
        )
    plain = {
        checkpoint_name(model, path)
        for path, module in model.named_modules()
        if getattr(module, "is_never_quantised", False)
    }
    if plain := plain & {name.rpartition(".")[0] for name in packed}:
        return (
            f"{min(plain)} is quantised, and an embedding or a router runs here only if it is not; "
            "choose another checkpoint of the model, where this layer is not quantised"
        )
    return (
        f"{min(packed)} is a part of a quantised weight; check quantization_config in config.json, "
        "which must say the weight's format, or choose another checkpoint of the model"
    )


def check_tensor(part: WeightSlice, path: Path, found: Any) -> None:
    """Raise ValueError unless a tensor has the shape of its slice and a dtype that can be read."""
    shape, is_number = tuple(found.get_shape()), part.shape == ()
    if (math.prod(shape) != 1) if is_number else (shape != part.shape):
        raise ValueError(
            f"{path}: {part.name} has shape {shape}, but by config.json it is {part.shape}: check "
            "both files, or download the model again"
        )
    if (dtype := found.get_dtype()) not in part.dtypes:
        raise ValueError(
            f"{path}: {part.name} is {dtype}, but by config.json it is {' or '.join(part.dtypes)}: "
            "check both files, or download the model again"
        )


def check_unread(model: nn.Module, checkpoint: Checkpoint) -> set[str]:
    """Check the tensors that layers know and do not read, and return the names of all of them."""
    names = set()
    for path, module in model.named_modules():
        if not hasattr(module, "unread_tensors"):
            continue
        for name, check in module.unread_tensors(checkpoint_name(model, path)):
            names.add(name)
            if check is not None and name in checkpoint:
                file, tensor = checkpoint[name]
                try:
                    check(tensor[...])
                except ValueError as error:
                    raise ValueError(f"{file}: {name} {error}: check both files") from error
    return names


def left_out(model: nn.Module | type[nn.Module], names: Iterable[str]) -> list[str]:
    """List the names of tensors that belong to parts of the model that are not run here."""
    parts = getattr(model, "left_out", ())
    return [name for name in names if name.startswith(tuple(f"{part}." for part in parts))]


def check_num_layers(num_layers: int, folder: str | Path, model: type[nn.Module]) -> None:
    """Raise ValueError unless the checkpoint has `num_layers` layers; log which parts are left out.

    Call this before the model is built, because a model of a million layers would take all memory.
    """
    prefix = checkpoint_name(model, "model.layers") + "."
    names = open_checkpoint(Path(folder))
    found = {name.removeprefix(prefix).split(".")[0] for name in names if name.startswith(prefix)}
    if others := left_out(model, names):
        ours = getattr(model, "left_out", ())
        named = [part for part in ours if any(name.startswith(f"{part}.") for name in others)]
        parts = ", ".join(sorted(named))
        logger.info(
            f"{folder}: {parts} left out ({len(others)} tensors): the model runs on text alone"
        )
    if len(found) != num_layers:
        raise ValueError(
            f"{folder}: num_hidden_layers is {num_layers} in config.json, but the checkpoint has "
            f"{len(found)} layers: download the model again, or check its config.json"
        )


def tied_heads(model: nn.Module) -> list[tuple[str, Any]]:
    """List the modules, with their paths, that share the weight of another module."""
    return [
        (path, module) for path, module in model.named_modules() if getattr(module, "tied", False)
    ]


def untie_heads(model: nn.Module, checkpoint: Checkpoint, pool: ThreadPoolExecutor) -> None:
    """Give a tied head its own weight if the checkpoint has one that differs from the embedding.

    Some checkpoints store a copy of the embedding as the head's weight. A head that differs from
    the embedding was trained, whatever tie_word_embeddings says. transformers uses such a head,
    too.
    """
    for head_path, head in tied_heads(model):
        name = f"{checkpoint_name(model, head_path)}.weight"
        (embedding,) = [
            f"{checkpoint_name(model, path)}.weight"
            for path, module in model.named_modules()
            if module is not head and getattr(module, "weight", None) is head.weight
        ]
        if (
            name in checkpoint
            and embedding in checkpoint
            and not are_equal(name, embedding, checkpoint, pool)
        ):
            head.untie()


def are_equal(one: str, other: str, checkpoint: Checkpoint, pool: ThreadPoolExecutor) -> bool:
    """Return whether two matrices of the checkpoint hold the same values in the same dtype."""
    (_, first), (_, second) = checkpoint[one], checkpoint[other]
    shape, dtype = first.get_shape(), first.get_dtype()
    if (shape, dtype) != (second.get_shape(), second.get_dtype()) or not shape:
        return False

    def equal_from(row: int) -> bool:
        rows = slice(row, row + COMPARED_ROWS)
        return torch.equal(first[rows], second[rows])

    return all(pool.map(equal_from, range(0, shape[0], COMPARED_ROWS)))


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the headers of the folder's files, and return all tensors by name.

    Raises ValueError if a file is broken, or if two files have a tensor of the same name.
    """
    checkpoint: Checkpoint = {}
    for path in checkpoint_files(folder):
        try:
            file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{path} is truncated or corrupt: download it again ({error})"
            ) from error
        for name in file.keys():
            if name in checkpoint:
                raise ValueError(
                    f"{path} and {checkpoint[name][0]} both have {name}: remove the wrong one"
                )
            checkpoint[name] = path, file.get_slice(name)
    return checkpoint


def checkpoint_files(folder: Path) -> list[Path]:
    """List the files that the index names or, without an index, all safetensors files.

    Raises ValueError if there is no file, if the index is broken, or if it names a file that is
    missing or outside of the folder.
    """
    index = folder / INDEX
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        # Mistral's folders hold the same weights under Mistral's own names, too.
        if files := [path for path in files if not path.name.startswith("consolidated")] or files:
            return files
        hint = "download the model again, or convert its weights"
        if any(folder.glob("*.gguf")):
            hint = TO_SAFETENSORS
        raise ValueError(f"{folder} has no *.safetensors file: {hint}")
    try:
        names = set(read_json(index)["weight_map"].values())
        outside = {name for name in names if leads_outside(folder, name)}
        missing = {name for name in names - outside if not (folder / name).is_file()}
    except (OSError, RuntimeError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index} is corrupt: download it again ({error})") from error
    if outside:
        raise ValueError(
            f"{index}: weight_map names {min(outside)!r:.99}, which lies outside of the folder: "
            "put the file into the folder and name it without a path, or download the model again"
        )
    if missing:
        raise ValueError(
            f"{folder} lacks {some_of(missing)}, which {INDEX} names: download the model again"
        )
    return [folder / name for name in sorted(names)]


def leads_outside(folder: Path, name: str) -> bool:
    """Return whether a name in an index leads out of the model's folder.

    The file itself may be a link, as all files in the hub's cache are, because whoever made the
    folder made the link as well. The index may come from elsewhere. So its names must not choose
    another folder, nor go through a link to one.
    """
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        return True
    return not (folder / path.parent).resolve().is_relative_to(folder.resolve())


def some_of(names: Iterable[str]) -> str:
    """Name the first three of many names, and count the rest, for an error message."""
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
