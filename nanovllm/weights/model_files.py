"""Read the files of a model folder that are not weights. Whatever is wrong with one is a ValueError
that names it.
"""

import json
from pathlib import Path
from typing import Any

TO_SAFETENSORS = (
    "transformers reads it: read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name). "
    "It may refuse to save that one, so let a fresh model take its weights: "
    "model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, gguf_file=name)), "
    "model.load_state_dict(read.state_dict()), model.save_pretrained(new_folder). "
    "AutoTokenizer.from_pretrained takes gguf_file too, and saves"
)


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds."""
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


def check_regular_files(folder: Path) -> None:
    """Refuse a folder with a FIFO, a device or a socket in it: who opens one may wait forever."""
    for path in (*folder.iterdir(), *(folder / "additional_chat_templates").glob("*")):
        # A link whose target is gone does no harm: it is as good as missing.
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ValueError(
                f"{path} is a pipe, a device or a socket: remove it, or put a regular file in its "
                "place"
            )
