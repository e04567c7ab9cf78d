"""Conversations as text: what a tokenizer's chat template makes of them."""

from typing import TYPE_CHECKING, Any

from nanovllm.checks import shown
from nanovllm.frontend.time_limit import run_limited

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What transformers' apply_chat_template takes for the tokens, which it does not make here.
OF_TOKENS = (
    *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
)
CHAT_SECONDS = 30.0  # for a chat template to write one conversation: most take a millisecond


def write_chats(
    tokenizer: "PreTrainedTokenizerBase", chats: list[list[dict]], options: dict[str, Any]
) -> list[str]:
    """Each conversation, up to where the assistant's turn begins. `options` go to the template.

    Raises TypeError for a message that holds more than text; ValueError for an option that is none
    of a template's, and for a conversation that the template refuses, or with which it is not done
    after CHAT_SECONDS.
    """
    for name in OF_TOKENS:
        if options.get(name):
            raise ValueError(
                f"chat_template_kwargs has {name!r}, {shown(options[name])}, which says what to "
                "make of the text: leave it out, and give generate what you make of the token ids "
                "of encode_chat"
            )
    chats = [[in_one(f"messages[{i}]", one) for one in chat] for i, chat in enumerate(chats)]
    options = {"add_generation_prompt": True, **options, "tokenize": False}
    texts: list[str] = []

    def write() -> None:
        for chat in chats:
            texts.append(str(tokenizer.apply_chat_template(chat, **options)))

    try:
        run_limited(write, CHAT_SECONDS, progress=lambda: len(texts))
    except TimeoutError as error:
        raise ValueError(
            f"messages[{len(texts)}] keeps the model's chat template busy without end: {error}."
            " Shorten it, or give another template in chat_template_kwargs['chat_template']"
        ) from error
    except Exception as error:  # a template raises whatever it likes
        raise ValueError(
            f"messages[{len(texts)}] does not fit the model's chat template: {error}"
        ) from error
    return texts


def in_one(name: str, message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is text: its parts, as OpenAI's API takes them, are put together.
    Many templates know no parts, and would write a list as Python does. An assistant that calls a
    tool needs no content: it is empty then, since many templates add it to a text.
    """
    parts = message.get("content")
    if parts is None and message.get("role") == "assistant":
        return {**message, "content": ""}
    if not isinstance(parts, list):
        return message
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise TypeError(f"{name} holds {shown(part)}: use text, or parts of type 'text'")
    return {**message, "content": "".join([part["text"] for part in parts])}
