"""The outputs of a call, made of requests that have ended."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from nanovllm.engine.sequence import Sequence
from nanovllm.frontend.tokenizer import Tokenizer
from nanovllm.outputs import RequestOutput, Texts

# Lists of token ids, and the indices of those whose special tokens are written too -> their texts.
Decode = Callable[[list[list[int]], list[int]], list[str]]


def make_outputs(requests: list[Sequence], decode: Decode | None) -> list[dict[str, Any]]:
    """Make a dict for each request, as `LLM.generate` describes it: of its prompt, of its first
    completion and, if there are several, the list of all. `decode` is None without a tokenizer.
    """
    texts = _texts([seq for request in requests for seq in request.completions], decode)
    outputs = []
    for request in requests:
        prompt: dict[str, Any] = {
            "prompt_token_ids": request.token_ids[: request.num_prompt_tokens],
            "num_cached_tokens": request.num_cached_tokens,
        }
        if request.scores is not None:
            count = request.num_prompt_tokens - 1
            prompt["prompt_logprobs"] = [None, *read_logprobs(request.scores.records, count)]
        own = [_completion(seq, texts[seq.id]) for seq in request.completions]
        outputs.append(prompt | own[0] | ({"completions": own} if len(own) > 1 else {}))
    return outputs


class TokenTexts(dict[int, str | None]):
    """Texts as transformers decodes them, each made when it is first asked for."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> str | None:
        text = str(self._tokenizer.transformers.decode([token])) if self._tokenizer else None
        self[token] = text
        return text


def with_attributes(output: dict[str, Any], request: Sequence, texts: Texts) -> RequestOutput:
    """Give a dict of `make_outputs` vLLM's attributes. `texts`: of tokens."""
    return RequestOutput(
        output,
        request_id=str(request.id),
        prompt=request.prompt_text,
        texts=texts,
        logprobs=request.params.logprobs,
        prompt_logprobs=request.params.prompt_logprobs,
    )


def _texts(sequences: list[Sequence], decode: Decode | None) -> dict[int, str]:
    """By id. Those that were not read as they grew are decoded in one call."""
    texts = {seq.id: "" if seq.text is None else seq.text.text for seq in sequences}
    if decode is not None:
        whole = [seq for seq in sequences if seq.text is None]
        with_special = [i for i, seq in enumerate(whole) if not seq.params.skip_special_tokens]
        decoded = decode([seq.text_ids for seq in whole], with_special)
        texts |= {seq.id: text for seq, text in zip(whole, decoded)}
    return texts


def _completion(seq: Sequence, text: str) -> dict[str, Any]:
    completion: dict[str, Any] = {
        "text": text,
        "token_ids": seq.output_ids,
        "finish_reason": seq.finish_reason,
        "stop_reason": _stop_reason(seq) if seq.finish_reason == "stop" else None,
    }
    if seq.error is not None:
        completion["error"] = seq.error
    if seq.params.logprobs is not None:
        completion["logprobs"] = logprobs = read_logprobs(seq.logprobs, len(seq.logprobs))
        sampled = zip(seq.output_ids, logprobs)
        completion["cumulative_logprob"] = math.fsum([one[token] for token, one in sampled])
    return completion


def _stop_reason(seq: Sequence) -> str | int | None:
    """What of `stop` or `stop_token_ids` ended the output. None: neither did."""
    if seq.text is not None and seq.text.stopped:
        return seq.text.stop_reason
    last = seq.token_ids[-1]
    return last if last in (seq.params.stop_token_ids or ()) else None


def read_logprobs(records: list[bytes], count: int) -> list[dict[int, float]]:
    """For each of `count` tokens a dict {token id: log-probability}, its own first.

    Steps leave records, because a step has no time to make a dict for each of its tokens.
    """
    if not count:
        return []
    ids, values = split_records(records, count)
    return [dict(zip(*row)) for row in zip(ids.tolist(), values.tolist())]


def split_records(records: list[bytes], count: int) -> tuple[np.ndarray, np.ndarray]:
    """The token ids [count, 1 + k] int32 of records, and their log-probabilities, float32.

    Of each token there is its own id and those of the k likeliest, each id before its value.
    """
    pairs = np.frombuffer(b"".join(records), dtype=np.int32).reshape(count, -1, 2)
    return pairs[..., 0], pairs.view(np.float32)[..., 1]
