"""The outputs of a call, which are made from requests that have ended."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from nanovllm.engine.request import Request
from nanovllm.engine.sequence import Sequence
from nanovllm.frontend.tokenizer import Tokenizer
from nanovllm.outputs import RequestOutput, Texts

# (lists of token ids, indices of the lists whose special tokens are kept) -> their texts.
Decode = Callable[[list[list[int]], list[int]], list[str]]


def make_outputs(requests: list[Request], decode: Decode | None) -> list[dict[str, Any]]:
    """Make the dict that `LLM.generate` describes for each request.

    A dict has the keys of the prompt and of the first completion. If the request has several
    completions, their list is there too. `decode` is None if the model has no tokenizer.
    """
    texts = _texts([seq for request in requests for seq in request.completions], decode)
    outputs = []
    for request in requests:
        prompt: dict[str, Any] = {
            "prompt_token_ids": request.prompt.copy(),
            "num_cached_tokens": request.num_cached_tokens,
        }
        if request.scores is not None:
            count = len(request.prompt) - 1
            prompt["prompt_logprobs"] = [None, *read_logprobs(request.scores.records, count)]
        own = [_completion(seq, texts[seq.id]) for seq in request.completions]
        outputs.append(prompt | own[0] | ({"completions": own} if len(own) > 1 else {}))
    return outputs


class TokenTexts(dict[int, str | None]):
    """The texts of single tokens, which transformers decodes when they are first looked up."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> str | None:
        text = str(self._tokenizer.transformers.decode([token])) if self._tokenizer else None
        self[token] = text
        return text


def with_attributes(output: dict[str, Any], request: Request, texts: Texts) -> RequestOutput:
    """Give a dict of `make_outputs` vLLM's attributes. `texts` maps token ids to their texts."""
    return RequestOutput(
        output,
        request_id=str(request.id),
        prompt=request.prompt_text,
        texts=texts,
        logprobs=request.params.logprobs,
        prompt_logprobs=request.params.prompt_logprobs,
    )


def _texts(sequences: list[Sequence], decode: Decode | None) -> dict[int, str]:
    """Return each sequence's text, by sequence id.

    Sequences that were not detokenized while they ran are decoded here, in one call.
    """
    texts = {seq.id: "" if seq.text is None else seq.text.text for seq in sequences}
    if decode is not None:
        whole = [seq for seq in sequences if seq.text is None]
        with_special = [i for i, seq in enumerate(whole) if not seq.params.skip_special_tokens]
        decoded = decode([seq.text_ids for seq in whole], with_special)
        texts |= {seq.id: text for seq, text in zip(whole, decoded)}
    return texts


def _completion(seq: Sequence, text: str) -> dict[str, Any]:
    """Make the keys of one completion, from `text` on."""
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
    """Return the entry of `stop` or `stop_token_ids` that ended the output, or None."""
    if seq.text is not None and seq.text.stopped:
        return seq.text.stop_reason
    last = seq.token_ids[-1]
    return last if last in (seq.params.stop_token_ids or ()) else None


def read_logprobs(records: list[bytes], count: int) -> list[dict[int, float]]:
    """Return a dict {token id: log-probability} for each of `count` tokens, its own id first.

    Steps keep raw records, because a step has no time to make a dict for each of its tokens.
    """
    if not count:
        return []
    ids, values = split_records(records, count)
    return [dict(zip(*row)) for row in zip(ids.tolist(), values.tolist())]


def split_records(records: list[bytes], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Split records into token ids and log-probabilities, [count, 1 + k] int32 and float32.

    The record of a token holds pairs of id and log-probability: first the token's own, then those
    of the k likeliest tokens.
    """
    pairs = np.frombuffer(b"".join(records), dtype=np.int32).reshape(count, -1, 2)
    return pairs[..., 0], pairs.view(np.float32)[..., 1]
