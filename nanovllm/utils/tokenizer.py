"""The model folder's tokenizer and its end-of-sequence tokens."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(folder: str) -> "PreTrainedTokenizerBase | None":
    """The folder's tokenizer, or None where it has none: then prompts are token ids and outputs have no text."""
    if not any(
        (Path(folder) / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    ):
        return None
    from transformers import (
        AutoTokenizer,
    )  # here because the ranks of tensor parallelism need none of it, and it takes seconds

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(f"{folder}: its tokenizer cannot be loaded, download it again ({error})") from error


def load_stop_ids(folder: str, tokenizer: "PreTrainedTokenizerBase | None") -> frozenset[int]:
    """The tokens that end a sequence: generation_config.json's (config.json's where that has none) and the tokenizer's."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        try:
            eos = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        except ValueError as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        if eos is not None:
            ids.update(eos if isinstance(eos, list) else [eos])
            break
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)


def decode_batch(tokenizer: "PreTrainedTokenizerBase | None", outputs: list[list[int]]) -> list[str]:
    """The text of each list of token ids, special tokens left out; without a tokenizer, no text."""
    if tokenizer is None:
        return [""] * len(outputs)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # decodes in threads, where transformers goes one by one
        return backend.decode_batch(outputs, skip_special_tokens=True)
    return [tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) for ids in outputs]


def render_chats(
    tokenizer: "PreTrainedTokenizerBase | None", chats: list[list[dict]], options: dict
) -> list[list[int]]:
    """The token ids of each conversation by the tokenizer's chat template, ready for the assistant's turn."""
    if tokenizer is None or not (tokenizer.chat_template or "chat_template" in options):
        raise ValueError(
            "the model has no chat template: use generate, or give one in chat_template_kwargs['chat_template']"
        )
    texts = []
    for i, chat in enumerate(chats):
        try:
            texts.append(
                tokenizer.apply_chat_template(chat, **{"add_generation_prompt": True, **options, "tokenize": False})
            )
        except Exception as error:  # a template raises whatever it likes
            raise ValueError(f"messages[{i}] does not fit the model's chat template: {error}") from error
    # The template has written the special tokens that a tokenizer would add.
    return tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
