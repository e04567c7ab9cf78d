"""The files of a model folder that are not weights.

Whatever is wrong with a file is a ValueError that names the file.
"""

import json
from pathlib import Path
from typing import Any

# The remedy for a GGUF file. transformers may refuse to save a model that it read from GGUF.
TO_SAFETENSORS = (
    "convert the GGUF file with transformers: "
    "read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name), "
    "model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, gguf_file=name)), "
    "model.load_state_dict(read.state_dict()), model.save_pretrained(new_folder) "
    "and AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(new_folder)"
)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object. Raises ValueError for any other file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(
            f"{path} cannot be read: its values are nested too deep. Download it again"
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}. Download it again") from error
    if not isinstance(values, dict):
        raise ValueError(
            f"{path} cannot be read: it holds a {type(values).__name__}, not an object. Download "
            "it again"
        )
    return values


def read_config_json(folder: str | Path) -> dict[str, Any]:
    """Read the config.json of a model folder. Raises ValueError if there is none to read."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        only_gguf = any(Path(folder).glob("*.gguf"))
        hint = f". GGUF files are not read: {TO_SAFETENSORS}" if only_gguf else ""
        raise ValueError(
            f"{folder} has no config.json: give the folder of a Hugging Face model{hint}"
        )
    return read_json(path)


def load_eos_ids(folder: Path) -> frozenset[int]:
    """Read the end-of-sequence tokens of a model folder.

    generation_config.json comes first; config.json counts where that file names none, and its
    text_config, which models that also see have, where config.json itself names none.
    """
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        values = read_json(path) if path.exists() else {}
        eos, language = values.get("eos_token_id"), values.get("text_config")
        if eos is None and isinstance(language, dict):
            eos = language.get("eos_token_id")
        if eos is None:
            continue
        eos = eos if isinstance(eos, list) else [eos]
        if any(type(i) is not int or i < 0 for i in eos):
            raise ValueError(
                f"{path}: eos_token_id is {eos}: it must be a token id or a list of them"
            )
        return frozenset(eos)
    return frozenset()


def check_regular_files(folder: Path) -> None:
    """Raise ValueError if a folder holds a pipe, a device or a socket.

    A process that opens one of these may wait forever.
    """
    for path in (*folder.iterdir(), *(folder / "additional_chat_templates").glob("*")):
        # A link whose target is gone does no harm, because reading it fails like a missing file.
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ValueError(
                f"{path} is a pipe, a device or a socket: remove it, or put a regular file in its "
                "place"
            )
