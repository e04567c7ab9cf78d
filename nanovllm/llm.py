"""The facade users import: text in, text out."""

import os
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from threading import RLock
from time import perf_counter
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from nanovllm.config import Config
from nanovllm.cpu.forked import keep_clear_of_lost_threads
from nanovllm.gpu.device import begin_driver
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.metrics import Metrics
from nanovllm.inputs import (
    check_completions,
    check_length,
    check_token_ids,
    split_chats,
    split_prompts,
    spread_params,
)
from nanovllm.engine.sequence import Sequence
from nanovllm.policies.throughput import ThroughputPolicy
from nanovllm.sampling_params import SamplingParams
from nanovllm.weights.hf_config import load_hf_config
from nanovllm.weights.hub import resolve_model_folder
from nanovllm.text.tokenizer import load_stop_ids, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ClosedError(ValueError):
    """The LLM was used after `close`, or closed while the call ran."""

    def __init__(self) -> None:
        super().__init__("this LLM is closed: make a new one")


class LLM:
    """A model that generates.

        llm = LLM("Qwen/Qwen3-0.6B")
        outputs = llm.generate(["Hello"], SamplingParams(temperature=0.6, max_tokens=64))

    See `nanovllm.config.Config` for every option. An LLM holds memory until `close`, which `with LLM(...) as llm` calls.
    Calls from several threads wait for each other. A forked process cannot use the LLM.
    """

    def __init__(self, model: str | os.PathLike, **options: Any) -> None:
        keep_clear_of_lost_threads()
        self._pid = os.getpid()
        # Held while the engine works. A call may come within another of the same thread.
        self._lock = RLock()
        self._is_closed = False
        self._is_unsettled = False  # a step was begun and not finished: the engine must be reset
        self.engine: LLMEngine | None = None
        config = Config.from_options(os.fspath(model) if isinstance(model, os.PathLike) else model, options)
        folder = resolve_model_folder(config.model)
        begin_driver(config.device)
        hf_config = load_hf_config(folder)
        try:
            # Reading a tokenizer can take seconds, and so does reading the weights.
            with ThreadPoolExecutor(1) as beside:
                tokenizer = beside.submit(load_tokenizer, folder)
                self.engine = LLMEngine(config, hf_config, folder, ThroughputPolicy())
            self._tokenizer = tokenizer.result()
            self.engine.stop_ids = load_stop_ids(folder, self._tokenizer)
        except BaseException:
            self.close()
            raise
        self.engine.decode = self._tokenizer.decode if self._tokenizer else None
        self._requests: dict[int, Sequence] = {}  # added one by one, their outputs not yet returned by `step`
        self._finished: list[Sequence] = []  # those of them that have ended

    def generate(
        self,
        prompts: str | list[str] | list[int] | list[list[int]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[dict[str, Any]]:
        """Complete prompts: text, or token ids.

        `sampling_params`: one for all, or a list as long as `prompts`. Returns, in the order of the prompts,
        {"text": str, "token_ids": list[int], "finish_reason": "stop" | "length"}; with `logprobs` asked for, also
        "logprobs", a dict {token id: log-probability} for each token; with n > 1, also "completions", all n of them.
        Raises ValueError or TypeError before anything runs if any request is wrong. An error or Ctrl-C inside leaves the
        LLM empty and usable.
        """
        return self._complete(self._check("prompts", self._encode(split_prompts(prompts)), sampling_params), use_tqdm)

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """Write the assistant's next turn in one conversation, or in each of a list: outputs as `generate` gives them.

        A conversation is a list of {"role": ..., "content": ...}. `chat_template_kwargs` go to the tokenizer's chat
        template, such as {"enable_thinking": False}.
        """
        chats, options = split_chats(messages), chat_template_kwargs or {}
        if self._tokenizer is None or not (self.has_chat_template or "chat_template" in options):
            raise ValueError(
                "the model has no chat template: use generate, or give one in chat_template_kwargs['chat_template']"
            )
        return self._complete(
            self._check("messages", self._tokenizer.encode_chats(chats, options), sampling_params), use_tqdm
        )

    def stream(
        self,
        prompts: str | list[str] | list[int] | list[list[int]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
    ) -> Iterator[tuple[int, str, list[int], str | None]]:
        """Complete prompts and yield, as steps finish: (index of the prompt, new text, new token ids, finish_reason).

        finish_reason is None until a prompt's last item, and "abort" at last if an error in another call dropped it. The
        texts of a prompt add up to what `generate` returns; one may be "" when a character or a stop string is not complete.
        Closing the iterator ends the requests that still run.
        """
        requests = self._check("prompts", self._encode(split_prompts(prompts)), sampling_params)
        for i, (_, params) in enumerate(requests):
            if params.n > 1:
                raise ValueError(
                    f"sampling_params[{i}].n is {params.n}: stream one completion of a prompt, or give it {params.n} times"
                )
        return self._stream(requests)

    def add_request(self, prompt: str | list[int], sampling_params: SamplingParams | None = None) -> int:
        """Queue one prompt for whoever calls `step`. Returns the request's id."""
        ((token_ids, params),) = self._check("prompts", self._encode([prompt]), sampling_params)
        with self._lock:
            request = self._settled_engine().add(token_ids, params, interactive=True)
            self._requests[request.id] = request
        return request.id

    def step(self) -> list[dict[str, Any]]:
        """Run one step. Returns the outputs, as `generate`'s with an "id" each, of requests that have finished."""
        self._open_engine()
        with self._lock:
            with self._running():
                self._step()
            finished = [request for request in self._finished if self._requests.pop(request.id, None)]
            self._finished.clear()
        return [{"id": request.id, **output} for request, output in zip(finished, self._outputs(finished))]

    def abort(self, request_id: int) -> None:
        """Drop a request that `add_request` gave this id and `step` has not returned."""
        self._open_engine()
        with self._lock:
            engine = self._settled_engine()
            if not isinstance(request_id, int) or request_id not in self._requests:
                raise ValueError(
                    f"request_id is {request_id!r}, which no unfinished request has: use what add_request returned"
                )
            engine.abort(self._requests.pop(request_id))

    def has_unfinished(self) -> bool:
        """Whether there is a request whose output `step` has yet to return."""
        return bool(self._requests)

    def metrics(self) -> dict[str, Any]:
        """What has been served: {"total": ..., "last_call": ..., "running": int, "waiting": int, "kv_cache_use": float}.

        "total" counts since the start, "last_call" since the last generate, chat or stream began. Both hold, of requests
        that have finished: requests, prompt_tokens, output_tokens, prefix_cache_hit_rate (of the prompts' tokens),
        preemptions, time_to_first_token and time_per_output_token (seconds, {"median", "p99"}, or None); and kv_cache_use,
        the most that was ever in use. The three outside are of now.
        """
        engine = self._open_engine()
        blocks = engine.scheduler.blocks
        return {
            "total": engine.total.summary(blocks.num_blocks),
            "last_call": engine.last_call.summary(blocks.num_blocks),
            "running": engine.scheduler.num_running,
            "waiting": len(engine.scheduler.waiting),
            "kv_cache_use": blocks.num_used / blocks.num_blocks,
        }

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """The model's tokenizer, as transformers has it; None if its folder has none. Imported at the first use."""
        return self._tokenizer.transformers if self._tokenizer else None

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` knows how the model wants a conversation written."""
        return self._tokenizer is not None and self._tokenizer.has_chat_template

    def close(self) -> None:
        """Give the memory back. Further calls raise ClosedError.

        Any thread may close, and more than once. If another thread is in a call, that call raises
        ClosedError after the step it is in, and this one waits for that. In a forked process it
        does nothing: the memory is its parent's.
        """
        if os.getpid() != self._pid:
            return
        self._is_closed = True  # which a call in another thread sees before its next step
        with self._lock:
            if self.engine is not None:
                self.engine.close()
                self.engine = None

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open_engine(self) -> LLMEngine:
        """The engine, if it may be used. Takes no lock: in a forked process nobody may hold it."""
        if os.getpid() != self._pid:
            raise ValueError(
                f"this LLM belongs to process {self._pid}, which forked this one, {os.getpid()}: "
                "call it there, or make an LLM in a process that multiprocessing's 'spawn' starts"
            )
        engine = self.engine
        if engine is None or self._is_closed:
            raise ClosedError
        return engine

    def _settled_engine(self) -> LLMEngine:
        """The engine, reset if an error or interrupt has left a step unfinished. Needs the lock.

        An interrupt may come in here too: the next call resets the engine then.
        """
        engine = self._open_engine()
        if self._is_unsettled:
            self._requests.clear()
            self._finished.clear()
            engine.reset()
            self._is_unsettled = False
        return engine

    def _check(
        self, name: str, prompts: SequenceOf[Any], sampling_params: Any
    ) -> list[tuple[list[int], SamplingParams]]:
        """Token ids and sampling parameters of every request, or an error for the first that is wrong."""
        engine = self._open_engine()
        requests = []
        for i, (ids, params) in enumerate(zip(prompts, spread_params(sampling_params, len(prompts)))):
            check_token_ids(f"{name}[{i}]", ids, engine.vocab_size)
            check_length(
                f"{name}[{i}]",
                len(ids),
                params,
                max_model_len=engine.max_model_len,
                longest_of_model=engine.longest_of_model,
                cache_tokens=engine.cache_tokens,
            )
            if params.n > 1:
                blocks, rows = engine.scheduler.blocks, engine.scheduler.max_num_seqs
                check_completions(f"{name}[{i}]", len(ids), params, rows, blocks.num_blocks, blocks.block_size)
            check_token_ids(f"sampling_params[{i}].stop_token_ids", params.stop_token_ids, engine.vocab_size)
            if params.min_tokens and len(set(params.stop_token_ids)) == engine.vocab_size:
                raise ValueError(
                    f"sampling_params[{i}].stop_token_ids holds the whole vocabulary, of which min_tokens={params.min_tokens} "
                    "lets none be drawn: leave a token out, or use min_tokens=0"
                )
            if params.stop and self._tokenizer is None:
                raise ValueError(
                    "stop needs text, but the model's folder has no tokenizer: use stop_token_ids, or add tokenizer.json"
                )
            requests.append((list(ids), params))
        return requests

    def _encode(self, prompts: SequenceOf[Any]) -> SequenceOf[Any]:
        if not prompts or not isinstance(prompts[0], str):
            return prompts
        if self._tokenizer is None:
            raise ValueError(
                "prompts holds text, but the model's folder has no tokenizer: give token ids, or add tokenizer.json"
            )
        for i, prompt in enumerate(prompts):
            if not isinstance(prompt, str):
                raise TypeError(
                    f"prompts[{i}] is a {type(prompt).__name__}: all prompts are text, or all are token ids"
                )
        return self._tokenizer.encode("prompts", list(prompts))

    def _complete(self, requests: list[tuple[list[int], SamplingParams]], use_tqdm: bool) -> list[dict[str, Any]]:
        """Run requests to their end; returns their outputs in order."""
        bar = tqdm(total=len(requests), desc="Generating", unit="request", disable=not use_tqdm, dynamic_ncols=True)
        with self._lock, closing(bar), self._running() as (engine, ours):
            self._settled_engine().last_call = Metrics()
            start, prefilled, decoded = perf_counter(), engine.num_prefill_tokens, engine.num_decode_tokens
            added = [engine.add(token_ids, params) for token_ids, params in requests]
            ours.update((request.id, request) for request in added)
            outputs: dict[int, dict[str, Any]] = {}
            while ours:
                finished = [request for request in self._step() if ours.pop(request.id, None)]
                if not finished:
                    continue
                # With overlap the device is at the next step already: this is the time to make text.
                outputs.update(zip([request.id for request in finished], self._outputs(finished)))
                if use_tqdm:
                    seconds = perf_counter() - start
                    bar.set_postfix_str(
                        f"prefill {(engine.num_prefill_tokens - prefilled) / seconds:,.0f} tok/s, "
                        f"decode {(engine.num_decode_tokens - decoded) / seconds:,.0f} tok/s",
                        refresh=False,
                    )
                    bar.update(len(finished))
        return [outputs[request.id] for request in added]

    def _stream(
        self, requests: list[tuple[list[int], SamplingParams]]
    ) -> Iterator[tuple[int, str, list[int], str | None]]:
        with self._running() as (engine, ours):
            # Sequences get their tokens here or, if the LLM is used between two items, elsewhere.
            with self._lock:
                self._settled_engine().last_call = Metrics()
                sequences = [engine.add(ids, params, streams=True, interactive=True) for ids, params in requests]
                ours.update(enumerate(sequences))
            num_seen = [seq.num_prompt_tokens for seq in sequences]
            while ours:
                self._open_engine()
                with self._lock:
                    self._step()
                for i, seq in list(ours.items()):
                    new_ids = seq.token_ids[num_seen[i] :]
                    if not new_ids and seq.finish_reason is None:
                        continue
                    num_seen[i] += len(new_ids)
                    if seq.finish_reason is not None:
                        del ours[i]
                    yield i, seq.text.take() if seq.text is not None else "", new_ids, seq.finish_reason

    @contextmanager
    def _running(self) -> Iterator[tuple[LLMEngine, dict[int, Sequence]]]:
        """The engine, and a dict for a call's unfinished sequences: those still there when the call is closed are aborted.

        An error or Ctrl-C resets the engine, since nobody knows how far the step has come.
        """
        engine = self._open_engine()
        ours: dict[int, Sequence] = {}
        try:
            yield engine, ours
        except GeneratorExit:
            if os.getpid() == self._pid:
                with self._lock, suppress(ClosedError):
                    engine = self._settled_engine()
                    for seq in ours.values():
                        engine.abort(seq)
            raise
        except BaseException as error:
            if os.getpid() == self._pid:
                with self._lock, suppress(ClosedError):
                    self._is_unsettled = True
                    self._settled_engine()
            if self._is_closed and isinstance(error, Exception):
                # If a signal handler closed the LLM in the middle of a step, it may be any error.
                if not isinstance(error, ClosedError):
                    raise ClosedError from error
            raise

    def _step(self) -> list[Sequence]:
        """Run one step; returns the requests whose last completion has ended. Needs the lock."""
        engine = self._settled_engine()
        self._is_unsettled = True  # until the step is done
        _, ended = engine.step()
        self._is_unsettled = False
        finished = [request for request in dict.fromkeys(seq.request for seq in ended) if request.has_ended]
        self._finished += [request for request in finished if request.id in self._requests]
        return finished

    def _outputs(self, requests: list[Sequence]) -> list[dict[str, Any]]:
        """What the user gets for finished requests: the first completion, and of several the list of all."""
        completions = iter(self._completion_outputs([seq for request in requests for seq in request.completions]))
        outputs = []
        for request in requests:
            all_of_it = [next(completions) for _ in request.completions]
            outputs.append({**all_of_it[0], "completions": all_of_it} if request.siblings else all_of_it[0])
        return outputs

    def _completion_outputs(self, sequences: list[Sequence]) -> list[dict[str, Any]]:
        whole = [seq for seq in sequences if seq.text is None]
        texts = {seq.id: "" for seq in whole}
        if self._tokenizer is not None:
            texts = dict(zip(texts, self._tokenizer.decode([seq.output_ids for seq in whole])))
        outputs = []
        for seq in sequences:
            text = texts[seq.id] if seq.text is None else seq.text.text
            output = {"text": text, "token_ids": seq.output_ids, "finish_reason": seq.finish_reason}
            if seq.params.logprobs is not None:
                output["logprobs"] = seq.logprobs
            outputs.append(output)
        return outputs
