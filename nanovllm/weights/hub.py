"""The way from a model's name to its folder, by the Hugging Face hub where it is not local."""

import os
from pathlib import Path

from nanovllm.weights.model_files import TO_SAFETENSORS, check_regular_files

DOWNLOADS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer*"]
NOT_DOWNLOADED = ["*/*", "consolidated*"]  # other formats of the same weights


def resolve_model_folder(model: str) -> Path:
    """Return the absolute path of the folder that `model` names; download it if it is a hub id.

    The path is absolute because the folder is read again later, when the working directory may be
    another. Raises ValueError if there is no such folder or repository, or if opening the folder's
    files could block.
    """
    folder = find_folder(model)
    try:
        folder = folder.absolute()
        check_regular_files(folder)
    except OSError as error:
        raise ValueError(
            f"model is {model!r}, a folder that cannot be read: check its permissions ({error})"
        ) from error
    return folder


def find_folder(model: str) -> Path:
    try:
        folder = Path(model).expanduser()
    except RuntimeError as error:  # there is no such user, or this one has no home
        raise ValueError(f"model is {model!r}: there is no such folder ({error})") from error
    if os.path.isdir(folder):  # False for a name that is too long, where Path.is_dir raises
        return folder
    if model.lower().endswith(".gguf"):
        raise ValueError(
            f"model is {model!r}: GGUF files are not read, give a folder of safetensors. "
            f"{TO_SAFETENSORS}"
        )
    if os.path.exists(folder):
        raise ValueError(f"model is {model!r}, which is a file: give the folder that it lies in")
    if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise ValueError(
            f"model is {model!r}: there is no such folder, nor is it a hub id like Qwen/Qwen3-0.6B"
        )
    return download(model)


def download(model: str) -> Path:
    # huggingface_hub takes long to import: a model that lies in a folder does without it.
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(model, allow_patterns=DOWNLOADS, ignore_patterns=NOT_DOWNLOADED)
        )
    except Exception as error:  # of huggingface_hub, or of the HTTP client that its release has
        # Tracebacks of three libraries say no more than this one line.
        raise ValueError(f"model is {model!r}: {explain_failure(model, error)}") from None


def explain_failure(model: str, error: Exception) -> str:
    """Say in one line why the hub did not give a model, and what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if isinstance(error, GatedRepoError):  # a kind of RepositoryNotFoundError, so it comes first
        return (
            "its owner must grant you access: request it on "
            f"https://huggingface.co/{model}, and set the variable HF_TOKEN to your token"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            "there is no such folder, and no such model on the Hugging Face hub, or it is private: "
            "check the name, or set the variable HF_TOKEN to a token that may read it"
        )
    if isinstance(error, HFValidationError):
        return "there is no such folder, nor is it a hub id like Qwen/Qwen3-0.6B"
    if isinstance(error, LocalEntryNotFoundError):  # neither on the hub nor in its local cache
        return (
            "there is no such folder, and the Hugging Face hub cannot be reached "
            f"({first_line(error.__cause__ or error)}): check the network, or give a folder; "
            "nanovllm.TINY_MODEL is one that needs no network"
        )
    return (
        "its download from the Hugging Face hub failed "
        f"({type(error).__name__}: {first_line(error)}): try again, or give a folder"
    )


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
