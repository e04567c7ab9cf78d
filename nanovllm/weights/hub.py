"""The way from a model's name to its folder, from the Hugging Face hub if it is not local."""

import os
from pathlib import Path

from nanovllm.weights.model_files import TO_SAFETENSORS, check_regular_files

DOWNLOADS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer*"]
NOT_DOWNLOADED = ["*/*", "consolidated*"]  # other formats of the same weights


def resolve_model_folder(model: str) -> Path:
    """Return the absolute path of the folder that `model` names; download it if it is a hub id.

    The path is absolute because the folder is read again later, when the working directory may have
    changed. Raises ValueError if there is no such folder or repository, or if opening the folder's
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
    """Return the folder that `model` names, or download it. Raises ValueError if there is none."""
    try:
        folder = Path(model).expanduser()
    except RuntimeError as error:  # the user after the "~" does not exist or has no home
        raise ValueError(
            f"model is {model!r}: there is no such folder ({error}): check the name"
        ) from error
    if os.path.isdir(folder):  # returns False for a name that is too long; Path.is_dir would raise
        return folder
    if model.lower().endswith(".gguf"):
        raise ValueError(
            f"model is {model!r}: GGUF files are not read, only folders of safetensors: "
            f"{TO_SAFETENSORS}"
        )
    if os.path.exists(folder):
        raise ValueError(f"model is {model!r}, which is a file: give the folder that it lies in")
    if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise ValueError(
            f"model is {model!r}: there is no such folder, and it is not a hub id like "
            "Qwen/Qwen3-0.6B: check the name"
        )
    return download(model)


def download(model: str) -> Path:
    """Download a model from the hub, and return its folder in the hub's cache.

    Raises ValueError with a remedy if the download fails.
    """
    # huggingface_hub takes long to import, and a model that lies in a folder does not need it.
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(model, allow_patterns=DOWNLOADS, ignore_patterns=NOT_DOWNLOADED)
        )
    except Exception as error:  # of huggingface_hub or of the HTTP client that its release uses
        # The line that explains the failure says as much as the tracebacks of three libraries.
        raise ValueError(f"model is {model!r}: {explain_failure(model, error)}") from None


def explain_failure(model: str, error: Exception) -> str:
    """Say in one line why a download failed, and what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if isinstance(error, GatedRepoError):  # a kind of RepositoryNotFoundError, so it comes first
        return (
            f"its owner must grant you access: request access on https://huggingface.co/{model}, "
            "and set the variable HF_TOKEN to your token"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            "there is no such folder, and no such model on the Hugging Face hub, or it is private: "
            "check the name, or set the variable HF_TOKEN to a token that may read it"
        )
    if isinstance(error, HFValidationError):
        return (
            "there is no such folder, and it is not a hub id like Qwen/Qwen3-0.6B: check the name"
        )
    if isinstance(
        error, LocalEntryNotFoundError
    ):  # the hub cannot be reached, and its cache lacks it
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
