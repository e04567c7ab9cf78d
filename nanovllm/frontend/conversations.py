"""Turn the conversations of a call into prompts: check them, and render the chat template."""

from collections.abc import Callable
from typing import Any

from nanovllm.checks import short_repr


def encode_conversations(
    messages: Any,
    tokenizer: Any,
    options: dict[str, Any],
    check: Callable[[str, list[str]], None] | None = None,
) -> tuple[list[str], list[list[int]]]:
    """Render one conversation or several with the chat template. Returns texts and token ids.

    `tokenizer` is None if the model has none. `options` go to the template. `check` is called with
    a name for errors and the texts, before they are tokenized.
    """
    conversations = _split(messages)
    if not isinstance(options, dict):
        raise TypeError(
            f"chat_template_kwargs is {short_repr(options)}: give a dict of what the chat "
            "template takes"
        )
    if tokenizer is None or not (tokenizer.has_chat_template or "chat_template" in options):
        raise ValueError(
            "the model has no chat template: use generate, "
            "or give one in chat_template_kwargs['chat_template']"
        )
    return tokenizer.encode_chats(conversations, options, check)


def _split(messages: Any) -> list[list[dict[str, Any]]]:
    """Return a list of conversations, whether the user gave one conversation or several."""
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
                f"messages[{i}] is {short_repr(conversation)}: a conversation is a list of "
                '{"role": ..., "content": ...}'
            )
    return list(conversations)
