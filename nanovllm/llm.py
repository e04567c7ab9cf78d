"""The facade users import: text in, text out."""

import os
from collections.abc import Sequence as SequenceOf
from time import perf_counter
from typing import Any

from tqdm.auto import tqdm

from nanovllm.config import Config
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.request import check_length, check_token_ids, split_prompts, spread_params
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.loader import resolve_model_folder
from nanovllm.utils.tokenizer import load_stop_ids, load_tokenizer


class LLM:
    """A model that generates.

        llm = LLM("Qwen/Qwen3-0.6B")
        outputs = llm.generate(["Hello"], SamplingParams(temperature=0.6, max_tokens=64))

    See `nanovllm.config.Config` for every option. An LLM holds memory until `close`, which `with LLM(...) as llm` calls.
    """

    def __init__(self, model: str | os.PathLike, **options: Any) -> None:
        config = Config.from_options(os.fspath(model), options)
        folder = resolve_model_folder(config.model)
        self.tokenizer = load_tokenizer(folder)
        self.engine: LLMEngine | None = LLMEngine(config, folder, load_stop_ids(folder, self.tokenizer))

    def generate(
        self,
        prompts: str | list[str] | list[int] | list[list[int]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[dict[str, Any]]:
        """Complete prompts: text, or token ids.

        `sampling_params`: one for all, or a list as long as `prompts`. Returns, in the order of the prompts,
        {"text": str, "token_ids": list[int], "finish_reason": "stop" | "length"}; with `logprobs` asked for, also
        "logprobs", a dict for each token. Raises ValueError or TypeError
        before anything runs if any request is wrong. An error or Ctrl-C inside leaves the LLM empty and usable.
        """
        engine = self._open_engine()
        requests = self._check(split_prompts(prompts), sampling_params)
        bar = tqdm(total=len(requests), desc="Generating", unit="request", disable=not use_tqdm, dynamic_ncols=True)
        start, prefilled, decoded = perf_counter(), engine.num_prefill_tokens, engine.num_decode_tokens
        try:
            sequences = [engine.add(ids, params) for ids, params in requests]
            while engine.has_unfinished():
                _, finished = engine.step()
                if finished and use_tqdm:
                    seconds = perf_counter() - start
                    bar.set_postfix_str(
                        f"prefill {(engine.num_prefill_tokens - prefilled) / seconds:,.0f} tok/s, "
                        f"decode {(engine.num_decode_tokens - decoded) / seconds:,.0f} tok/s",
                        refresh=False,
                    )
                    bar.update(len(finished))
        except BaseException:
            engine.reset()
            raise
        finally:
            bar.close()
        texts = self._decode([seq.output_ids for seq in sequences])
        return [_output(seq, text) for seq, text in zip(sequences, texts)]

    def close(self) -> None:
        """Give the memory back. Further calls raise."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open_engine(self) -> LLMEngine:
        if self.engine is None:
            raise ValueError("this LLM is closed: make a new one")
        return self.engine

    def _check(self, prompts: SequenceOf[Any], sampling_params: Any) -> list[tuple[list[int], SamplingParams]]:
        """Token ids and sampling parameters of every request, or an error for the first that is wrong."""
        engine = self._open_engine()
        all_params = spread_params(sampling_params, len(prompts))
        requests = []
        for i, (ids, params) in enumerate(zip(self._encode(prompts), all_params)):
            name = f"prompts[{i}]"
            check_token_ids(name, ids, engine.vocab_size)
            check_length(
                name, len(ids), params, max_model_len=engine.max_model_len, cache_tokens=engine.cache_tokens
            )
            check_token_ids(f"sampling_params[{i}].stop_token_ids", params.stop_token_ids, engine.vocab_size)
            requests.append((list(ids), params))
        return requests

    def _encode(self, prompts: SequenceOf[Any]) -> SequenceOf[Any]:
        if not prompts or not isinstance(prompts[0], str):
            return prompts
        if self.tokenizer is None:
            raise ValueError("prompts holds text, but the model's folder has no tokenizer: give token ids, or add tokenizer.json")
        for i, prompt in enumerate(prompts):
            if not isinstance(prompt, str):
                raise TypeError(f"prompts[{i}] is a {type(prompt).__name__}: all prompts are text, or all are token ids")
        return self.tokenizer(list(prompts))["input_ids"]

    def _decode(self, token_ids: list[list[int]]) -> list[str]:
        if self.tokenizer is None:
            return [""] * len(token_ids)
        return self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)


def _output(seq: Sequence, text: str) -> dict[str, Any]:
    output = {"text": text, "token_ids": seq.output_ids, "finish_reason": seq.finish_reason}
    return output if seq.params.logprobs is None else {**output, "logprobs": seq.logprobs}
