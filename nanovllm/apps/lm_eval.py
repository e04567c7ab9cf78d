"""The model "nanovllm" for lm-evaluation-harness, which importing this module registers.

    python -m nanovllm.apps.lm_eval --model nanovllm --model_args pretrained=FOLDER ...

is the command line of the harness with this model added. The harness asks for log-likelihoods of
texts and for generated texts. This model encodes, truncates and decodes texts in the same way as
the harness's model "hf", which runs transformers; it calls the harness's own functions where they
exist.
"""

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    has_bos_prefix,
    maybe_truncate,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from nanovllm.frontend.chat import write_chat
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams

TokenPair = tuple[Any, list[int], list[int]]  # (texts or None, context, continuation)


@register_model("nanovllm")
class NanovllmLM(TemplateLM):
    """An LLM behind the interface of the harness.

    pretrained: the model's folder or hub id.
    options: options of `LLM`, such as max_model_len. Longer texts are truncated at their beginning.
    device: as in `LLM`. "cuda:0", the default of the harness's command line, means "auto" here: a
        GPU if there is one.
    max_gen_toks: the longest output, in tokens, for tasks that set no limit.
    chat_template_args: arguments for the chat template.
    enable_thinking: the argument of this name for the chat template.
    think_end_token: the text that ends a thought; it is removed with all text before it.
    batch_size, max_batch_size, trust_remote_code: ignored; the harness's command line passes them
        to every model. The engine makes its own batches, and runs no code of a model folder.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        device: str = "auto",
        max_gen_toks: int = 256,
        chat_template_args: dict[str, Any] | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.llm = LLM(pretrained, device="auto" if device == "cuda:0" else device, **options)
        try:
            self.tokenizer: Any = self.llm.get_tokenizer()
        except ValueError:  # the folder has no tokenizer
            self.llm.close()
            raise
        self.max_length = self.llm.max_model_len
        self.max_gen_toks = max_gen_toks
        self.think_end_token = think_end_token
        self.chat_template_args = dict(chat_template_args or {})
        if enable_thinking is not None:
            self.chat_template_args["enable_thinking"] = enable_thinking
        self._added_tokens: dict[str, int] = self.tokenizer.get_added_vocab()

    @property
    def eot_token_id(self) -> int:
        """The id of the end-of-sequence token."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The id of the token that precedes a text without a context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """The name by which the harness caches chat requests."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Write a conversation as a prompt; drop system messages that the template refuses."""

        def write(messages: list[dict[str, str]]) -> str:
            return write_chat(
                self.tokenizer,
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **self.chat_template_args,
            )

        try:
            return write(chat_history)
        except TemplateError:  # some templates refuse the system role
            return write([message for message in chat_history if message["role"] != "system"])

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Encode a text."""
        if add_special_tokens is None:  # a chat template may have written the BOS token already
            prefix = self.tokenizer.decode(self.prefix_token_id)
            add_special_tokens = not has_bos_prefix(string, prefix)
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def _loglikelihood_tokens(
        self, requests: list[TokenPair], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return for each pair the continuation's log-likelihood, and whether it is greedy."""
        contexts, continuations = [], []
        for _, context, continuation in requests:
            # The last token is scored, but is never an input of the model.
            room = self.max_length + 1 - len(continuation)
            if room < 1:
                raise ValueError(
                    f"a continuation has {len(continuation)} tokens, but max_model_len is "
                    f"{self.max_length}: raise it in model_args"
                )
            contexts.append(context[-room:])
            continuations.append(continuation)
        scores = self.llm.score(contexts, continuations, use_tqdm=not disable_tqdm)
        refuse_errors(scores)
        return [(score["cumulative_logprob"], all(score["is_greedy"])) for score in scores]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each text, scored in windows of max_model_len tokens."""
        windows: list[TokenPair] = []
        owners: list[int] = []
        for i, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            pairs = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1)
            for context, continuation in map(make_disjoint_window, pairs):
                windows.append((None, context, continuation))
                owners.append(i)
        sums = [0.0] * len(requests)
        for i, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm)):
            sums[i] += logprob
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate a text for each request."""
        asked = [self._prompt_and_params(*request.args) for request in requests]
        prompts, params = [prompt for prompt, _ in asked], [one for _, one in asked]
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        refuse_errors(outputs)
        texts = [
            self.tokenizer.decode(output["token_ids"], skip_special_tokens=True)
            for output in outputs
        ]
        return [
            postprocess_generated_text(text, [*(one.stop or ())], self.think_end_token)
            for text, one in zip(texts, params)
        ]

    def _prompt_and_params(
        self, context: str, gen_kwargs: dict[str, Any]
    ) -> tuple[list[int], SamplingParams]:
        """Return the token ids and sampling parameters of a request.

        Raises TypeError for a name that SamplingParams does not have.
        """
        kwargs = normalize_gen_kwargs(gen_kwargs, self.max_gen_toks)
        max_gen_toks = kwargs.pop("max_gen_toks")
        if max_gen_toks >= self.max_length:
            raise ValueError(
                f"max_gen_toks is {max_gen_toks}, but max_model_len is {self.max_length}: raise "
                "max_model_len in model_args, or lower max_gen_toks in gen_kwargs, to leave room "
                "for prompts"
            )
        prompt, _ = maybe_truncate(self.tok_encode(context), max_gen_toks, self.max_length)
        stop = [text for text in kwargs.pop("until") if text]
        # Output texts lack special tokens, so a special token among the stop strings goes by id.
        ids = [self._added_tokens[text] for text in stop if text in self._added_tokens]
        del kwargs["do_sample"]
        kwargs.setdefault("temperature", 0.0)
        if kwargs.get("num_beams") == 1:  # some tasks give the default
            del kwargs["num_beams"]
        kwargs |= dict(max_tokens=max_gen_toks, stop=stop, stop_token_ids=ids)
        return prompt, SamplingParams(**kwargs)


def refuse_errors(answers: Sequence[dict[str, Any]]) -> None:
    """Raise FloatingPointError if any answer is an error, which no figure may be based on."""
    for i, answer in enumerate(answers):
        if "error" in answer:
            raise FloatingPointError(f"request {i} of {len(answers)}: {answer['error']}")


if __name__ == "__main__":
    cli_evaluate()
