"""Conversations as text: what a tokenizer's chat template makes of them."""

from typing import TYPE_CHECKING, Any

from nanovllm.text.time_limit import run_limited

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHAT_SECONDS = 30.0  # for a chat template to write one conversation: most take a millisecond


def write_chats(
    tokenizer: "PreTrainedTokenizerBase", chats: list[list[dict]], options: dict[str, Any]
) -> list[str]:
    """Each conversation, up to where the assistant's turn begins. `options` go to the template.

    Raises ValueError for a conversation that the template refuses, or with which it is not done
    after CHAT_SECONDS.
    """
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
