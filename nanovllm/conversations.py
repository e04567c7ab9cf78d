"""Check the conversations of a call, and have the model's chat template write them."""

from collections.abc import Callable
from typing import Any

from nanovllm.checks import shown


def encode_conversations(
    messages: Any,
    tokenizer: Any,
    options: dict[str, Any],
    check: Callable[[str, list[str]], None] | None = None,
) -> tuple[list[str], list[list[int]]]:
    """One conversation or several as the chat template writes them: texts and token ids.

    `tokenizer`: None if the model has none. `options` go to the template. `check`: called with a
    name for errors and the texts, before they are tokenized.
    """
    conversations = _split(messages)
    if not isinstance(options, dict):
        raise TypeError(
            f"chat_template_kwargs is {shown(options)}: give a dict of what the chat template takes"
        )
    if tokenizer is None or not (tokenizer.has_chat_template or "chat_template" in options):
        raise ValueError(
            "the model has no chat template: use generate, "
            "or give one in chat_template_kwargs['chat_template']"
        )
    return tokenizer.encode_chats(conversations, options, check)


def _split(messages: Any) -> list[list[dict[str, Any]]]:
    """One conversation or several -> a list of conversations."""
    if not isinstance(messages, (list, tuple)):
        raise TypeError(
            f"messages is a {type(messages).__name__}: "
            "give a list of messages, or a list of such lists"
        )
    conversations = [messages] if messages and isinstance(messages[0], dict) else messages
    for i, conversation in enumerate(conversations):
        if not isinstance(conversation, (list, tuple)) or not all(
            isinstance(message, dict) for message in conversation
        ):
            raise TypeError(
                f"messages[{i}] is {shown(conversation)}: a conversation is a list of "
                '{"role": ..., "content": ...}'
            )
    return list(conversations)
