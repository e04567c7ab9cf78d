"""What a call returns, plain dicts made of requests that have ended, and the progress it shows
until then."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from nanovllm.engine.metrics import StepRecord
from nanovllm.engine.sequence import Sequence

Decode = Callable[[list[list[int]]], list[str]]


def make_outputs(requests: list[Sequence], decode: Decode | None) -> list[dict[str, Any]]:
    """A dict for each request, as `LLM.generate` describes it: of its prompt, of its first
    completion and, if there are several, the list of all. `decode` is None without a tokenizer.
    """
    sequences = [seq for request in requests for seq in request.completions]
    completions = iter(_completions(sequences, decode))
    outputs = []
    for request in requests:
        prompt = {
            "prompt_token_ids": request.token_ids[: request.num_prompt_tokens],
            "num_cached_tokens": request.num_cached_tokens,
        }
        own = [next(completions) for _ in request.completions]
        outputs.append(prompt | own[0] | ({"completions": own} if len(own) > 1 else {}))
    return outputs


def _completions(sequences: list[Sequence], decode: Decode | None) -> list[dict[str, Any]]:
    # The others' texts were read as they grew.
    whole = [seq for seq in sequences if seq.text is None]
    texts = decode([seq.output_ids for seq in whole]) if decode is not None else [""] * len(whole)
    text_of = {seq.id: text for seq, text in zip(whole, texts)}
    completions = []
    for seq in sequences:
        text = text_of[seq.id] if seq.text is None else seq.text.text
        completion = {"text": text, "token_ids": seq.output_ids, "finish_reason": seq.finish_reason}
        if seq.params.logprobs is not None:
            completion["logprobs"] = read_logprobs(seq.logprobs)
        completions.append(completion)
    return completions


def read_logprobs(records: list[bytes]) -> list[dict[int, float]]:
    """Of each token a record: int32 token ids, each before its log-probability, a float32.

    Steps leave records, because a step has no time to make a dict for each of its tokens.
    """
    if not records:
        return []
    ids = np.frombuffer(b"".join(records), dtype=np.int32).reshape(len(records), -1, 2)
    values = ids.view(np.float32)
    return [dict(zip(*row)) for row in zip(ids[..., 0].tolist(), values[..., 1].tolist())]


class Progress:
    """A bar of a call's requests that have finished, with the tokens a second that all steps have
    computed meanwhile.

    `on_step`: the LLM's.
    """

    def __init__(
        self,
        request_ids: list[int],
        on_step: Callable[[Callable[[StepRecord], Any]], Callable[[], None]],
        shown: bool,
    ) -> None:
        self._bar = tqdm(
            total=len(request_ids),
            desc="Generating",
            unit="request",
            disable=not shown,
            dynamic_ncols=True,
        )
        self._begin = perf_counter()
        self._unfinished = set(request_ids)
        self._num_prefill_tokens = self._num_decode_tokens = 0
        self._end = on_step(self._update) if shown else None

    def _update(self, step: StepRecord) -> None:
        self._num_prefill_tokens += step.prefill_tokens
        self._num_decode_tokens += step.decode_tokens
        seconds = perf_counter() - self._begin
        prefill, decode = self._num_prefill_tokens / seconds, self._num_decode_tokens / seconds
        self._bar.set_postfix_str(
            f"prefill {prefill:,.0f} tok/s, decode {decode:,.0f} tok/s", refresh=False
        )
        finished = self._unfinished.intersection(step.finished)
        self._unfinished -= finished
        self._bar.update(len(finished))

    def close(self) -> None:
        if self._end is not None:
            self._end()
        self._bar.close()
