"""Conversations as text: what a chat template makes of them."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.checks import short_repr

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What transformers' apply_chat_template takes for the tokens, which it does not make here.
OF_TOKENS = (
    *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"),
)
# The names under which a message holds its reasoning. Templates know one or two of them.
REASONING = ("reasoning_content", "thinking", "reasoning")
OPEN_END = "\U000f0000 open end "  # marks where the text of a turn that goes on has to end


def write_chats(
    tokenizer: "PreTrainedTokenizerBase", chats: list[list[dict]], options: dict[str, Any]
) -> list[str]:
    """Return each conversation as the chat template writes it, up to where the assistant's turn
    begins. `options` go to the template.

    The text is that of transformers' apply_chat_template. The template runs in a sandbox that
    bounds its work, in the caller's thread.

    Raises TypeError for a message that holds more than text; ValueError for an option that is none
    of a template's, and for a conversation that the template refuses, or with which it does too
    much work.
    """
    from nanovllm.frontend.sandbox import TooMuchWorkError  # few processes write chats

    for name in OF_TOKENS:
        if options.get(name):
            raise ValueError(
                f"chat_template_kwargs has {name!r}, {short_repr(options[name])}, which "
                "says what to "
                "make of the text: leave it out, and give generate what you make of the token ids "
                "of encode_chat"
            )
    options = {name: value for name, value in options.items() if name not in OF_TOKENS}
    chats = [[in_one(f"messages[{i}]", one) for one in chat] for i, chat in enumerate(chats)]
    texts: list[str] = []
    try:
        for chat in chats:
            texts.append(write_chat(tokenizer, chat, **options))
    except TooMuchWorkError as error:
        raise ValueError(
            f"messages[{len(texts)}] keeps the model's chat template busy without end: {error}."
            " Shorten it, or give another template in chat_template_kwargs['chat_template']"
        ) from error
    except Exception as error:  # a template raises whatever it likes
        raise ValueError(
            f"messages[{len(texts)}] does not fit the model's chat template: {str(error)[:1000]}"
        ) from error
    return texts


def write_chat(
    tokenizer: "PreTrainedTokenizerBase",
    chat: list[dict],
    *,
    chat_template: str | None = None,
    tools: list | None = None,
    documents: list | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool | str = False,
    **variables: Any,
) -> str:
    """Return one conversation as the chat template writes it. Raises whatever the template raises.

    Args:
        chat_template: a template, or the name of one of the model's; None: the model's own.
        tools: JSON schemas, or functions whose signature and docstring say the same.
        continue_final_message: leave the last message open, for the model to go on with it. A str
            names the field that the model goes on with.
        variables: further variables of the template, by their names.
    """
    from transformers.utils import get_json_schema

    from nanovllm.frontend.sandbox import render

    template = tokenizer.get_chat_template(chat_template, tools)
    if not isinstance(template, str):
        raise TypeError(f"chat_template is {short_repr(template)}: give a str")
    if not chat:
        raise ValueError("it has no message: give at least one")
    if tools is not None:
        tools = [get_json_schema(one) if callable(one) else one for one in tools]
    messages = [with_reasoning(without_none(as_plain(message))) for message in chat]
    end = None
    if continue_final_message:
        if add_generation_prompt:
            raise ValueError(
                "add_generation_prompt begins another turn than the one that "
                "continue_final_message leaves open: set one of them to False"
            )
        field = "content" if continue_final_message is True else str(continue_final_message)
        end = leave_open(messages[-1], field)
    known = {
        **tokenizer.special_tokens_map,
        "tools": as_plain(tools),
        "documents": as_plain(documents),
        "add_generation_prompt": add_generation_prompt,
        **as_plain(variables),
    }
    text = render(template, known | {"messages": messages})
    return text if end is None else cut_open_end(text, end)


def leave_open(message: dict[str, Any], field: str) -> str:
    """Mark the end of a message's field. Returns the field's text."""
    text = message.get(field)
    if not isinstance(text, str):
        raise ValueError(f"its last message has no {field!r} to go on with: give one")
    for name in REASONING if field in REASONING else (field,):
        if message.get(name) == text:  # the same reasoning, under another name
            message[name] = text + OPEN_END
    return text


def cut_open_end(text: str, end: str) -> str:
    """Cut what a template wrote where the marked field ends."""
    place = text.rfind(OPEN_END.strip())
    if place < 0 or end.strip() not in text:
        raise ValueError(
            "the template leaves out or changes the end of the last message, which "
            "continue_final_message wants to go on with: leave that option out"
        )
    before = text[:place]
    # A template that trims the field has taken the mark's blank. It would trim the text, too.
    return before if text.startswith(OPEN_END, place) else before.rstrip()


def without_none(message: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is None, such as the content beside a tool call. Templates write "None"."""
    return {name: value for name, value in message.items() if value is not None}


def with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Name a message's reasoning as newer templates and those of gpt-oss do."""
    for name in REASONING:
        if (reasoning := message.get(name)) is not None:
            return {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def as_plain(value: Any) -> Any:
    """Rebuild a value of JSON's types, so that a template finds no methods of other classes."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # an enum's own __str__ writes its name
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {as_plain(key): as_plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)([as_plain(one) for one in value])
    if isinstance(value, np.generic):
        return as_plain(value.item())
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_plain(getattr(value, field.name)) for field in fields(value)}
    if callable(getattr(value, "model_dump", None)):  # pydantic's
        return as_plain(value.model_dump())
    return f"<{type(value).__name__}>"


def in_one(name: str, message: dict[str, Any]) -> dict[str, Any]:
    """Join the parts of a message's content, as OpenAI's API takes them, into one text.

    Many templates know no parts and would write the list as Python does. An assistant that calls a
    tool needs no content. Its content is empty then, because many templates add it to a text.
    """
    parts = message.get("content")
    if parts is None and message.get("role") == "assistant":
        return {**message, "content": ""}
    if not isinstance(parts, list):
        return message
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise TypeError(f"{name} holds {short_repr(part)}: use text, or parts of type 'text'")
    return {**message, "content": "".join([part["text"] for part in parts])}
