"""Check what a call asks for, all of it before any of it is queued."""

from collections.abc import Sequence as SequenceOf
from reprlib import repr  # cuts what is long, or nested so deep that the built-in one raises

from nanovllm.sampling_params import SamplingParams


def split_prompts(prompts) -> list[str] | list[list[int]]:
    """One prompt or several, as text or as token ids -> a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise TypeError(f"prompts is a {type(prompts).__name__}: give a str, a list of str, or lists of token ids")
    if prompts and isinstance(prompts[0], int):
        return [list(prompts)]
    return list(prompts)


def split_chats(messages) -> list[list[dict]]:
    """One conversation or several -> a list of conversations."""
    if not isinstance(messages, (list, tuple)):
        raise TypeError(f"messages is a {type(messages).__name__}: give a list of messages, or a list of such lists")
    chats = [messages] if messages and isinstance(messages[0], dict) else messages
    for i, chat in enumerate(chats):
        if not isinstance(chat, (list, tuple)) or not all(isinstance(message, dict) for message in chat):
            raise TypeError(f'messages[{i}] is {repr(chat)}: a conversation is a list of {{"role": ..., "content": ...}}')
    return list(chats)


def spread_params(params, count: int) -> list[SamplingParams]:
    """One SamplingParams for all prompts, or one for each -> one for each."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, (list, tuple)):
        raise TypeError(f"sampling_params is a {type(params).__name__}: give a SamplingParams or a list of them")
    if len(params) != count:
        raise ValueError(
            f"sampling_params has {len(params)} entries for {count} prompts: give one for all, or one for each prompt"
        )
    for i, one in enumerate(params):
        if not isinstance(one, SamplingParams):
            raise TypeError(f"sampling_params[{i}] is a {type(one).__name__}: give a SamplingParams")
    return list(params)


def check_token_ids(name: str, ids: SequenceOf[int], vocab_size: int) -> None:
    if not isinstance(ids, (list, tuple)):
        raise TypeError(f"{name} is a {type(ids).__name__}: give a str or a list of token ids, all prompts of one kind")
    if not set(map(type, ids)) <= {int}:
        wrong = next(token for token in ids if type(token) is not int)
        raise TypeError(f"{name} holds {repr(wrong)}: token ids are integers")
    if ids and not (0 <= min(ids) and max(ids) < vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise ValueError(f"{name} holds token id {wrong}: the model's vocabulary is 0 to {vocab_size - 1}")


def check_length(
    name: str,
    length: int,
    params: SamplingParams,
    *,
    max_model_len: int,
    longest_of_model: int,
    cache_tokens: int,
) -> None:
    """`longest_of_model`: what no option can raise `max_model_len` above.
    `cache_tokens`: what the whole KV cache holds.
    """
    if length == 0:
        raise ValueError(f"{name} is empty: give at least one token")
    if length >= longest_of_model:
        raise ValueError(
            f"{name} has {length} tokens, the model's own limit (max_position_embeddings) is "
            f"{longest_of_model}: shorten it to leave room for one"
        )
    if length >= max_model_len:
        raise ValueError(
            f"{name} has {length} tokens, max_model_len is {max_model_len}: shorten it to leave room for one, "
            "or raise max_model_len"
        )
    total = min(length + params.max_tokens, max_model_len)
    if total - 1 > cache_tokens:  # the last token's K and V are never needed
        raise ValueError(
            f"{name} needs {total - 1} tokens of KV cache ({length} of prompt and max_tokens={params.max_tokens}), "
            f"which holds {cache_tokens}: lower max_tokens, shorten the prompt, or raise num_kvcache_blocks "
            "or gpu_memory_utilization"
        )


def check_completions(
    name: str, length: int, params: SamplingParams, max_num_seqs: int, num_blocks: int, block_size: int
) -> None:
    """All n completions begin at once, each with a block of its own where the prompt fills the last one only in part."""
    if params.n > max_num_seqs:
        raise ValueError(
            f"n is {params.n} for {name}, and {max_num_seqs} sequences may run at the same time, the "
            "lesser of max_num_seqs and max_num_batched_tokens: lower n, or raise that one"
        )
    full, tail = divmod(length, block_size)
    needed = full + (params.n if tail else 0)
    if needed > num_blocks:
        raise ValueError(
            f"n is {params.n} for {name}, which takes {needed} KV blocks to begin with, and there are {num_blocks}: "
            "lower n, or raise num_kvcache_blocks or gpu_memory_utilization"
        )
