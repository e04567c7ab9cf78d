"""The facade users import: text in, text out."""

from collections.abc import Callable, Iterable, Iterator
from os import PathLike
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn

from nanovllm.checks import name_the_nearest, shown
from nanovllm.compose import (
    build_engine,
    choose_view,
    collect_rarely,
    describe_device,
    prepare_process,
    share_cores,
    trainer,
)
from nanovllm.config import Config
from nanovllm.conversations import encode_conversations
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.metrics import StepRecord
from nanovllm.engine.sequence import Sequence
from nanovllm.inputs import Inputs, Request
from nanovllm.log import say_ready, show_unless_configured
from nanovllm.outputs import make_outputs
from nanovllm.progress import Shown, progress
from nanovllm.sampling_params import SamplingParams
from nanovllm.scores import score
from nanovllm.session import Session
from nanovllm.streams import Piece, stream

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

Prompt = str | list[int] | dict[str, Any]
Prompts = Prompt | list[str] | list[list[int]] | list[dict[str, Any]] | list[Prompt]
Messages = list[dict[str, Any]] | list[list[dict[str, Any]]]
Params = SamplingParams | list[SamplingParams] | None
TemplateOptions = dict[str, Any] | None
Outputs = list[dict[str, Any]]  # of requests, as `generate` describes them


class LLM:
    """A model that generates.

        llm = LLM("Qwen/Qwen3-0.6B")
        outputs = llm.generate(["Hello"], SamplingParams(temperature=0.6, max_tokens=64))

    `nanovllm.config.Config` describes every option. An LLM holds memory until `close`, which
    `with LLM(...) as llm` calls. Calls from several threads wait for each other. A forked process
    cannot use the LLM.

    A wrong option, model folder or call raises ValueError or TypeError, which says what to do. Of
    a call, nothing has been queued then. Any other error inside a call, and Ctrl-C, leaves the LLM
    empty and usable.

    num_kvcache_blocks: KV blocks there are, asked for or found to fit into memory.
    max_model_len: tokens of prompt and output together, the option's or the model's own limit.
    """

    def __init__(self, model: str | PathLike, **options: Any) -> None:
        begin = perf_counter()
        prepare_process()
        config = Config.from_options(model, options)
        show_unless_configured()
        engine, self._tokenizer = build_engine(config)
        info = engine.runner.info
        self.num_kvcache_blocks = info.num_blocks
        self.max_model_len = info.max_model_len
        self._inputs = Inputs(config, engine, self._tokenizer)
        self._view = choose_view(self._tokenizer)
        self._session = Session(engine, collect_rarely(), share_cores(engine, config))
        device = describe_device(info.device, config.tensor_parallel_size)
        say_ready(config, info, device, perf_counter() - begin)

    @name_the_nearest("argument")
    def generate(
        self, prompts: Prompts, sampling_params: Params = None, use_tqdm: Shown = True
    ) -> Outputs:
        """Complete prompts: text, or token ids, or a dict of either as "prompt" or
        "prompt_token_ids".

        `sampling_params`: one for all, or a list as long as `prompts`. `use_tqdm`: show progress;
        or what makes the bar, as tqdm does.

        Returns a dict for each prompt, in their order:

        prompt_token_ids: list[int].
        num_cached_tokens: int, how many of them the prefix cache held.
        prompt_logprobs: if asked for, None for the first token of the prompt, and for each other
            a dict {token id: log-probability}, its own token first.
        text: str, "" without a tokenizer.
        token_ids: list[int] of the completion alone.
        finish_reason: "stop" or "length".
        stop_reason: the stop string, or the id among stop_token_ids, that ended it; else None.
        logprobs: if asked for, a dict {token id: log-probability} for each token.
        cumulative_logprob: with them, float, the sum over token_ids.
        completions: if n > 1, all n, as dicts of the keys from text to cumulative_logprob.

        The dicts have vLLM's attributes, too: `nanovllm.compat.RequestOutput`.
        """
        return self._complete(self._prompt_requests(prompts, sampling_params), use_tqdm)

    @name_the_nearest("argument")
    def chat(
        self,
        messages: Messages,
        sampling_params: Params = None,
        use_tqdm: Shown = True,
        chat_template_kwargs: TemplateOptions = None,
    ) -> Outputs:
        """Write the assistant's next turn in one conversation, or in each of a list.

        A conversation is a list of {"role": ..., "content": ...}. `chat_template_kwargs` go to the
        tokenizer's chat template, such as {"enable_thinking": False}. Returns what `generate` does.
        """
        requests = self._chat_requests(messages, sampling_params, chat_template_kwargs)
        return self._complete(requests, use_tqdm)

    def stream(self, prompts: Prompts, sampling_params: Params = None) -> Iterator[Piece]:
        """Complete prompts, and yield pieces as steps finish.

        A piece: (index of the prompt, new text, new token ids, finish_reason). finish_reason is
        None until a prompt's last piece, and "abort" there if an error in another call dropped it.
        The texts of a prompt add up to `generate`'s. One is "" while a character, a run of byte
        tokens or what may become a stop string is incomplete. Closing the iterator ends the
        requests that still run.
        """
        return stream(self._session, self._prompt_requests(prompts, sampling_params))

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: Params = None,
        chat_template_kwargs: TemplateOptions = None,
    ) -> Iterator[Piece]:
        """Take what `chat` takes, yield what `stream` yields."""
        requests = self._chat_requests(messages, sampling_params, chat_template_kwargs)
        return stream(self._session, requests)

    def score(
        self,
        contexts: list[str] | list[list[int]],
        continuations: list[Any],
        use_tqdm: Shown = True,
    ) -> list[Any]:
        """How likely `continuations` are after `contexts`: two lists of one length.

        A context is text or token ids, at least one token, and so is a continuation. A context's
        entry in `continuations` is one, or a list of several. Text is encoded as evaluation
        harnesses do it: as a whole, from which the context's tokens are taken off; spaces at the
        context's end go to the continuation. Both together may have max_model_len tokens, and one
        more.

        Returns for each context a dict, or a list of them if it has a list of continuations:

        token_ids: list[int] of the continuation.
        logprobs: list[float], the log-probability of each, by the model's own logits.
        cumulative_logprob: float, their sum.
        is_greedy: list[bool], whether each is what greedy sampling would have chosen there.

        With the prefix cache, a context that comes more than once is computed once, but for up to
        15 of its last tokens.
        """
        self._session.awake_engine()
        return score(self._session, self._inputs, contexts, continuations, use_tqdm)

    def encode(self, prompts: str | list[str], check_length: bool = False) -> list[list[int]]:
        """The token ids that `generate` makes of each prompt.

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
        """The token ids that `chat` makes of each conversation: a prompt for `add_request`.

        `check_length`: as `encode` takes it.
        """
        self._session.open_engine()
        options, check = chat_template_kwargs or {}, self._check_of(check_length)
        _, token_ids = encode_conversations(messages, self._tokenizer, options, check)
        return token_ids

    def _check_of(self, check_length: bool) -> Callable[[str, list[str]], None] | None:
        return self._inputs.refuse_long if check_length else None

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue one prompt for whoever calls `step`. Returns the request's id."""
        (checked,) = self._prompt_requests([prompt], sampling_params)
        session = self._session
        with session.lock, session.running():
            request = session.settled_engine().add(*checked, interactive=True)
            session.requests[request.id] = request
        return request.id

    def step(self) -> Outputs:
        """Run one step. Returns outputs, each with an "id", of the requests that have finished."""
        session = self._session
        session.open_engine()
        with session.lock, session.running():
            session.step()
            finished = [seq for seq in session.finished if session.requests.pop(seq.id, None)]
            session.finished.clear()
            outputs = self._outputs(finished)
        return [self._view({"id": seq.id, **output}, seq) for seq, output in zip(finished, outputs)]

    def abort(self, request_id: int) -> None:
        """Drop a request that `add_request` gave this id and `step` has not returned."""
        with self._session.request(request_id) as (engine, request):
            del self._session.requests[request.id]
            engine.abort(request)

    def pause(self, request_id: int) -> None:
        """Let a request run no more, until `resume`. It goes on to the same tokens then.

        It keeps its KV blocks until others need them; then it is computed anew. If the step that
        runs already brings its last token, it ends. `step` returns at once where all are paused.
        """
        with self._session.request(request_id) as (engine, request):
            engine.pause(request)

    def resume(self, request_id: int) -> None:
        """Let a paused request go on. One that is not paused is left alone."""
        with self._session.request(request_id) as (engine, request):
            engine.resume(request)

    def has_unfinished(self) -> bool:
        """Whether there is a request, paused or not, whose output `step` has yet to return."""
        return bool(self._session.requests)

    def metrics(self) -> dict[str, Any]:
        """What has been served, and what runs now.

        total, last_call: since the start, and since the last generate, chat or stream began. Each
            is a dict of requests that have finished: requests, prompt_tokens, output_tokens,
            prefix_cache_hit_rate (of the prompts' tokens), kv_cache_use (the most, from 0 to 1),
            preemptions, time_to_first_token and time_per_output_token (seconds, a dict of median
            and p99, or None).
        running, waiting, paused: requests; of one that has started, each completion counts.
        kv_cache_use: from 0 to 1.
        """
        engine = self._session.open_engine()
        blocks = engine.scheduler.blocks
        return {
            "total": engine.total.summary(blocks.num_blocks),
            "last_call": engine.last_call.summary(blocks.num_blocks),
            "running": engine.scheduler.num_running,
            "waiting": len(engine.scheduler.waiting),
            "paused": len(engine.scheduler.paused),
            "kv_cache_use": blocks.num_used / blocks.num_blocks,
        }

    def on_step(self, callback: Callable[[StepRecord], Any]) -> Callable[[], None]:
        """Call `callback` after each step with what it did, a `nanovllm.engine.metrics.StepRecord`.

        Returns a function that ends this. The callback runs in the thread of the step and may use
        the LLM, for example to abort a request. What it raises leaves the call as any error does.
        """
        self._session.open_engine()
        if not callable(callback):
            raise TypeError(f"callback is {shown(callback)}: give a function of a StepRecord")
        return self._session.observe(callback)

    def update_weights(self, weights: "Iterable[tuple[str, Tensor]]") -> None:
        """Go on with new weights, and with an empty prefix cache.

        `weights`: pairs of name and tensor, such as `model.state_dict().items()` of a model of
        transformers, or a checkpoint's tensors. Shapes are those of this model's checkpoint;
        device and floating-point dtype may be others. All of them must be there, but for a head
        that is tied. They wait in the CPU's memory, which must have room for the model, until all
        have come: where one is wrong or missing, ValueError or TypeError names it, and the old
        weights stay.

        No request may be unfinished. An LLM that is asleep takes them too.
        """
        trainer().update_weights(self._session, weights)

    def sleep(self, level: int = 1) -> None:
        """Lend the device's memory to others: the KV cache's and the weights'.

        `level`: 1 keeps the weights in the CPU's memory. Those of a GPU take up to twice their
        size there, which stays taken for the next time. 2 forgets them: `wake_up` reads the model
        folder again, unless `update_weights` has brought new ones. Calls that run requests raise
        AsleepError until `wake_up`. No request may be unfinished.
        """
        trainer().sleep(self._session, level)

    @name_the_nearest("argument")
    def wake_up(self) -> None:
        """Take the memory again that `sleep` gave back. The prefix cache is empty then.

        An error, such as too little memory, leaves the LLM asleep: call this again.
        """
        trainer().wake_up(self._session)

    @property
    def engine(self) -> LLMEngine | None:
        """What runs the requests: for those who look inside. None once this is closed."""
        return self._session.engine

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """The model's tokenizer, as transformers loads it at the first use. None: it has none."""
        return self._tokenizer.transformers if self._tokenizer else None

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """`tokenizer`, which vLLM gives by this name. Raises ValueError where there is none."""
        if self._tokenizer is None:
            raise ValueError("the model's folder has no tokenizer: add tokenizer.json")
        return self._tokenizer.transformers

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
        self._session.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        """For pickle and copy: what an LLM holds is its process's, and there once."""
        raise TypeError(
            "an LLM cannot be pickled or copied, as for a worker process: make one in each process"
        )

    def _prompt_requests(self, prompts: Any, params: Any) -> list[Request]:
        self._session.awake_engine()
        return self._inputs.from_prompts(prompts, params)

    def _chat_requests(self, messages: Any, params: Any, options: TemplateOptions) -> list[Request]:
        self._session.awake_engine()
        texts, token_ids = encode_conversations(
            messages, self._tokenizer, options or {}, self._inputs.refuse_long
        )
        return self._inputs.requests("messages", token_ids, params, texts)

    def _complete(self, requests: list[Request], use_tqdm: Shown) -> Outputs:
        """Run requests to their end; returns their outputs in order."""
        session = self._session
        with session.call() as engine:
            added = [engine.add(*request) for request in requests]
            unfinished = {request.id for request in added}
            outputs: dict[int, dict[str, Any]] = {}
            with progress(len(added), unfinished, session.observe, use_tqdm):
                while unfinished:
                    # A step may also finish requests of others, such as those of `add_request`.
                    if ours := {seq.id: seq for seq in session.step() if seq.id in unfinished}:
                        unfinished.difference_update(ours)
                        # With overlap the next step runs already: this is the time to make text.
                        outputs |= zip(ours, self._outputs([*ours.values()]))
        return [self._view(outputs[request.id], request) for request in added]

    def _outputs(self, requests: list[Sequence]) -> Outputs:
        return make_outputs(requests, self._tokenizer.decode if self._tokenizer else None)
