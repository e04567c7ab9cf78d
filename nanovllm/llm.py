"""The facade that users import: text in, text out."""

from collections.abc import Callable, Iterable, Iterator
from os import PathLike
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn

from nanovllm.backends.cpu.forked import keep_clear_of_lost_threads
from nanovllm.backends.cpu.garbage import full_collections_are_rare
from nanovllm.backends.cpu.layers import float32_is_faster
from nanovllm.backends.cuda.device import describe_device
from nanovllm.build import build_engine, share_cores
from nanovllm.checks import name_the_nearest, no_attribute, short_repr
from nanovllm.config import Config
from nanovllm.engine.errors import check_any_succeeded
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.request import Request
from nanovllm.features.weight_updates.new_weights import update_weights
from nanovllm.features.weight_updates.sleep import sleep, wake_up
from nanovllm.foreign_names import IN_CHAT, IN_GENERATE, IN_WAKE_UP, OF_LLM
from nanovllm.frontend.conversations import encode_conversations
from nanovllm.frontend.inputs import CheckedInput, Inputs
from nanovllm.frontend.log import say_ready, show_unless_configured
from nanovllm.frontend.outputs import TokenTexts, make_outputs, with_attributes
from nanovllm.frontend.progress import Shown, progress
from nanovllm.frontend.score import score
from nanovllm.frontend.session import Session
from nanovllm.frontend.stream import Piece, stream
from nanovllm.frontend.tokenizer import need_tokenizer
from nanovllm.outputs import RequestOutput, StepRecord
from nanovllm.sampling_params import OF_SAMPLING_PARAMS, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

Prompt = str | list[int] | dict[str, Any]
Prompts = Prompt | list[str] | list[list[int]] | list[dict[str, Any]] | list[Prompt]
Messages = list[dict[str, Any]] | list[list[dict[str, Any]]]
Params = SamplingParams | list[SamplingParams] | None
TemplateOptions = dict[str, Any] | None


class LLM:
    """A language model that generates text.

        llm = LLM("Qwen/Qwen3-0.6B")
        outputs = llm.generate(["Hello"], SamplingParams(temperature=0.6, max_tokens=64))

    `nanovllm.config.Config` describes every option. An LLM holds memory until `close`, which
    `with LLM(...) as llm` calls. Calls from several threads wait for each other. A forked process
    cannot use the LLM.

    A wrong option, model folder or argument raises ValueError or TypeError with the remedy, before
    anything is queued. Any other error inside a call, and Ctrl-C, leaves the LLM empty and usable.

    num_kvcache_blocks: The number of KV blocks, as requested or as many as fit into memory.
    max_model_len: The most tokens of prompt and output together: the option's value, or the
        model's own limit if that is lower.
    """

    def __init__(self, model: str | PathLike, **options: Any) -> None:
        begin = perf_counter()
        keep_clear_of_lost_threads()
        config = Config.from_options(model, options)
        show_unless_configured()
        engine, self._tokenizer = build_engine(config)
        info = engine.runner.info
        self.num_kvcache_blocks = info.num_blocks
        self.max_model_len = info.max_model_len
        self._inputs = Inputs(config, engine, self._tokenizer)
        self._token_texts = TokenTexts(self._tokenizer)
        self._session = Session(engine, full_collections_are_rare, share_cores(engine, config))
        device = describe_device(info.device, config.tensor_parallel_size)
        if info.device == "cpu" and float32_is_faster(info.dtype):
            device += ", where float32 is faster"
        say_ready(config, info, device, perf_counter() - begin)

    @name_the_nearest("argument", OF_SAMPLING_PARAMS | IN_GENERATE)
    def generate(
        self, prompts: Prompts, sampling_params: Params = None, use_tqdm: Shown = True
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: Each prompt is text, token ids, or a dict with the text as "prompt" or the
                token ids as "prompt_token_ids".
            sampling_params: One for all prompts, or a list as long as `prompts`.
            use_tqdm: Whether to show progress; or a function that makes the bar, as tqdm does.

        Returns a dict for each prompt, in the order of the prompts:

        prompt_token_ids: list[int].
        num_cached_tokens: int, how many prompt tokens the prefix cache held.
        prompt_logprobs: if requested, None for the first token of the prompt, and for each other
            token a dict {token id: log-probability} that begins with this token.
        text: str, "" without a tokenizer.
        token_ids: list[int], the tokens of the completion alone.
        finish_reason: "stop" or "length"; or "error" if no token could be sampled any more, because
            the logits were NaN or infinite or the request's constraints left no token.
        stop_reason: the stop string, or the id among stop_token_ids, that ended the completion;
            otherwise None.
        error: what went wrong, if finish_reason is "error". The other keys then hold what there was
            before the error.
        logprobs: if requested, a dict {token id: log-probability} for each token.
        cumulative_logprob: if logprobs are requested, their sum over token_ids, a float.
        completions: if n > 1, all n completions, as dicts of the keys from text to
            cumulative_logprob.

        The dicts also have vLLM's attributes: see `nanovllm.RequestOutput`. If every request of the
        call ends with an error, the call raises InvalidLogitsError, and the LLM stays usable.
        """
        return self._complete(self._check_prompts(prompts, sampling_params), use_tqdm)

    @name_the_nearest("argument", OF_SAMPLING_PARAMS | IN_CHAT)
    def chat(
        self,
        messages: Messages,
        sampling_params: Params = None,
        use_tqdm: Shown = True,
        chat_template_kwargs: TemplateOptions = None,
    ) -> list[RequestOutput]:
        """Generate the assistant's next turn in a conversation, or in each of several.

        A conversation is a list of {"role": ..., "content": ...}. `chat_template_kwargs`, such as
        {"enable_thinking": False}, go to the tokenizer's chat template. Returns what `generate`
        returns.
        """
        inputs = self._check_chats(messages, sampling_params, chat_template_kwargs)
        return self._complete(inputs, use_tqdm)

    def stream(self, prompts: Prompts, sampling_params: Params = None) -> Iterator[Piece]:
        """Complete prompts, and yield pieces as steps finish.

        A piece is (index of the prompt, new text, new token ids, finish_reason). finish_reason is
        None until the last piece of a prompt, and "abort" there if an error in another call dropped
        the request. If finish_reason is "error", a warning in the log says what went wrong; if
        every request ends with an error, InvalidLogitsError follows the last piece.

        The texts of a prompt's pieces add up to the text that `generate` returns. The text of a
        piece is "" while a character, a run of byte tokens or a possible stop string is incomplete.
        Closing the iterator ends the requests that still run.
        """
        return stream(self._session, self._check_prompts(prompts, sampling_params))

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: Params = None,
        chat_template_kwargs: TemplateOptions = None,
    ) -> Iterator[Piece]:
        """Generate the assistant's next turns as `chat` does, and yield pieces as `stream` does."""
        inputs = self._check_chats(messages, sampling_params, chat_template_kwargs)
        return stream(self._session, inputs)

    def score(
        self,
        contexts: list[str] | list[list[int]],
        continuations: list[Any],
        use_tqdm: Shown = True,
    ) -> list[Any]:
        """Compute how likely `continuations` are after `contexts`, two lists of the same length.

        A context is text or token ids of at least one token, and so is a continuation. The entry of
        a context in `continuations` is one continuation, or a list of several. Text is encoded as
        evaluation harnesses do it: context and continuation are encoded together, and the tokens of
        the context are then taken off; spaces at the end of the context belong to the continuation.
        Context and continuation together may have max_model_len + 1 tokens.

        Returns for each context a dict, or a list of dicts if the context has a list of
        continuations:

        token_ids: list[int], the tokens of the continuation.
        logprobs: list[float], the log-probability of each token by the model's own logits.
        cumulative_logprob: float, the sum of logprobs.
        is_greedy: list[bool], whether greedy sampling would have chosen each token.
        error: a message, only if the model computed NaN or infinite logits. The numbers may then be
            NaN or infinite too. If every score has an error, the call raises InvalidLogitsError.

        With the prefix cache, a context that comes more than once is computed once, except for up
        to 15 of its last tokens.
        """
        self._session.awake_engine()
        return score(self._session, self._inputs, contexts, continuations, use_tqdm)

    def encode(self, prompts: str | list[str], check_length: bool = False) -> list[list[int]]:
        """Return the token ids that `generate` makes of each prompt.

        `check_length`: raise ValueError, before any prompt is tokenized, for one that cannot fit
        into max_model_len, as `generate` does.
        """
        self._session.open_engine()
        return self._inputs.encode(prompts, check=self._check_of(check_length))

    def encode_chat(
        self,
        messages: Messages,
        chat_template_kwargs: TemplateOptions = None,
        check_length: bool = False,
    ) -> list[list[int]]:
        """Return the token ids that `chat` makes of each conversation, for `add_request`.

        `check_length`: as `encode` takes it.
        """
        self._session.open_engine()
        options, check = chat_template_kwargs or {}, self._check_of(check_length)
        _, token_ids = encode_conversations(messages, self._tokenizer, options, check)
        return token_ids

    def _check_of(self, check_length: bool) -> Callable[[str, list[str]], None] | None:
        return self._inputs.refuse_long if check_length else None

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue one prompt, which calls of `step` then complete. Returns the id of the request."""
        (checked,) = self._check_prompts([prompt], sampling_params)
        session = self._session
        with session.lock:
            engine = session.clean_engine()
            with session.running():
                request = engine.add(*checked, interactive=True)
                session.requests[request.id] = request
        return request.id

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns the outputs, each with an "id", of requests that have finished."""
        session = self._session
        session.open_engine()
        with session.lock:
            session.steppable_engine()
            with session.running():
                session.step()
                finished = [one for one in session.finished if session.requests.pop(one.id, None)]
                session.finished.clear()
                outputs = self._outputs(finished)
        return [
            with_attributes({"id": request.id, **output}, request, self._token_texts)
            for request, output in zip(finished, outputs)
        ]

    def abort(self, request_id: int) -> None:
        """Drop the request that `add_request` gave this id, unless `step` has returned it."""
        with self._session.request(request_id) as (engine, request):
            del self._session.requests[request.id]
            engine.abort(request)

    def pause(self, request_id: int) -> None:
        """Keep a request from running until `resume`. Its tokens are the same as without the pause.

        The request keeps its KV blocks until other requests need them; it is then recomputed. If
        the step that already runs brings its last token, the request ends. `step` returns at once
        if all requests are paused.
        """
        with self._session.request(request_id) as (engine, request):
            engine.pause(request)

    def resume(self, request_id: int) -> None:
        """Let a paused request continue. Does nothing for a request that is not paused."""
        with self._session.request(request_id) as (engine, request):
            engine.resume(request)

    def has_unfinished(self) -> bool:
        """Tell whether `step` has yet to return the output of a request, paused or not."""
        return bool(self._session.requests)

    def metrics(self) -> dict[str, Any]:
        """Return figures of the requests that have finished, and of those that run now.

        total, last_call: figures of the requests that have finished since the start, and since the
            last generate, chat or stream began. Each is a dict of requests, prompt_tokens,
            output_tokens, prefix_cache_hit_rate (the part of the prompt tokens that were cached),
            kv_cache_use (the most, from 0 to 1), preemptions, time_to_first_token and
            time_per_output_token (seconds, as a dict of median and p99, or None).
        running, waiting, paused: numbers of completions. Of a prompt that is not computed yet, only
            the first completion counts as waiting.
        kv_cache_use: the part of the KV blocks in use, from 0 to 1.
        state_snapshots: for a model with recurrent layers, a dict of the states that are kept for
            later prompts: kept and room (how many there are, and how many can be), saved, used and
            evicted (counts since the prefix cache was last emptied). None for other models.
        """
        engine = self._session.open_engine()
        blocks, snapshots = engine.scheduler.blocks, engine.snapshots
        return {
            "total": engine.metrics.total.summary(blocks.num_blocks),
            "last_call": engine.metrics.last_call.summary(blocks.num_blocks),
            "running": engine.scheduler.num_running,
            "waiting": len(engine.scheduler.waiting),
            "paused": len(engine.scheduler.paused),
            "kv_cache_use": blocks.num_used / blocks.num_blocks,
            "state_snapshots": None if snapshots is None else snapshots.summary(),
        }

    def on_step(self, callback: Callable[[StepRecord], Any]) -> Callable[[], None]:
        """Call `callback` after each step with a `nanovllm.StepRecord` of what the step did.

        Returns a function that ends these calls. The callback runs in the thread of the step. It
        may add, abort, pause and resume requests, close the LLM, and read. A method that runs steps
        or needs an idle LLM (`sleep`, `wake_up`, `update_weights`, `reset_prefix_cache`) raises
        RuntimeError there. An error of the callback ends the call and drops its requests.
        """
        self._session.open_engine()
        if not callable(callback):
            raise TypeError(f"callback is {short_repr(callback)}: give a function of a StepRecord")
        return self._session.observe(callback)

    def update_weights(self, weights: "Iterable[tuple[str, Tensor]]") -> None:
        """Replace the weights of the model, and empty the prefix cache.

        `weights`: pairs of name and tensor, such as `model.state_dict().items()` of a model of
        transformers, or the tensors of a checkpoint. The shapes are those of this model's
        checkpoint; device and floating-point dtype may differ. All weights must be there, except a
        tied head. The new weights are kept in the CPU's memory, which must have room for the model,
        until all have come. If a weight is wrong or missing, ValueError or TypeError names it, and
        the old weights stay.

        No request may be unfinished. The LLM may be asleep.
        """
        with self._session.idle("update_weights") as engine:
            update_weights(engine, weights)

    def sleep(self, level: int = 1) -> None:
        """Give back the device memory of the KV cache and of the weights until `wake_up`.

        `level`: 1 keeps the weights in the CPU's memory. The weights of a GPU take up to twice
        their size there, and this memory stays allocated for the next `sleep`. 2 drops the weights:
        `wake_up` reads the model folder again, unless `update_weights` has brought new weights.

        Calls that run requests raise AsleepError until `wake_up`. No request may be unfinished.
        """
        with self._session.idle("sleep") as engine:
            sleep(engine, level)

    @name_the_nearest("argument", IN_WAKE_UP)
    def wake_up(self) -> None:
        """Take back the memory that `sleep` gave back. The prefix cache is then empty.

        An error, such as too little memory, leaves the LLM asleep: call `wake_up` again.
        """
        with self._session.idle("wake_up") as engine:
            wake_up(engine)

    def reset_prefix_cache(self) -> bool:
        """Forget the KV of all earlier requests. Returns True. No request may be unfinished."""
        with self._session.idle("reset_prefix_cache") as engine:
            engine.reset()
        return True

    @property
    def engine(self) -> LLMEngine | None:
        """The engine that runs the requests, for users who look inside. None after `close`."""
        return self._session.engine

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """The model's tokenizer, which transformers loads at the first use. None: there is none."""
        return self._tokenizer.transformers if self._tokenizer else None

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Return `tokenizer`, as vLLM's method of this name does. Raises ValueError without one."""
        return need_tokenizer(self._tokenizer).transformers

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer has a chat template, which `chat` needs."""
        return self._tokenizer is not None and self._tokenizer.has_chat_template

    def close(self) -> None:
        """Give back all memory. Further calls raise ClosedError.

        Any thread may call `close`, and more than once. A call that another thread is in raises
        ClosedError after its current step, and `close` waits for that. In a forked process `close`
        does nothing, because the memory belongs to the parent process.
        """
        self._session.close()

    if not TYPE_CHECKING:  # which would take every name for one that is there

        def __getattr__(self, name: str) -> NoReturn:
            raise no_attribute("LLM", name, OF_LLM)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        """Refuse pickle and copy: an LLM holds memory and processes that exist only once."""
        raise TypeError(
            "an LLM cannot be pickled or copied, for example to a worker process: make an LLM in "
            "each process"
        )

    def _check_prompts(self, prompts: Any, params: Any) -> list[CheckedInput]:
        self._session.awake_engine()
        return self._inputs.from_prompts(prompts, params)

    def _check_chats(
        self, messages: Any, params: Any, options: TemplateOptions
    ) -> list[CheckedInput]:
        self._session.awake_engine()
        texts, token_ids = encode_conversations(
            messages, self._tokenizer, options or {}, self._inputs.refuse_long
        )
        return self._inputs.check_all("messages", token_ids, params, texts)

    def _complete(self, inputs: list[CheckedInput], use_tqdm: Shown) -> list[RequestOutput]:
        """Run requests to their end. Returns their outputs in order."""
        with self._session.call() as engine:
            added = [engine.add(*one) for one in inputs]
            unfinished = {request.id for request in added}
            outputs: dict[int, RequestOutput] = {}
            with progress(len(added), unfinished, self._session.observe, use_tqdm):
                while unfinished:
                    # A step may also finish requests of other calls, such as `add_request`.
                    ended = [one for one in self._session.step() if one.id in unfinished]
                    if ended:
                        unfinished.difference_update([request.id for request in ended])
                        # With overlap, the device already runs the next step while text is made.
                        for request, output in zip(ended, self._outputs(ended)):
                            output = with_attributes(output, request, self._token_texts)
                            outputs[request.id] = output
        check_any_succeeded(added)
        return [outputs[request.id] for request in added]

    def _outputs(self, requests: list[Request]) -> list[dict[str, Any]]:
        return make_outputs(requests, self._tokenizer.decode if self._tokenizer else None)
