"""Which tokens may come next, if an output must have a given form. Owns llguidance, an extra.

Knows texts, tokens and bit masks. Knows nothing of steps, blocks and tensors.

llguidance (https://github.com/guidance-ai/llguidance) parses the output so far by Earley's
algorithm, and walks a trie of the vocabulary along what its lexer allows. It compiles in about a
millisecond, since it works out masks as they are asked for.
"""

import itertools
import json
import os
import re
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np

from nanovllm.sampling_params import StructuredOutputsParams

MOST_KEPT = 256  # compiled grammars
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
NUM_THREADS = max(1, min(32, CORES * 4 // 5))  # that make masks
INSTALL = 'pip install -e ".[structured]"'
# No line of Lark's begins so. Lark's `start` may stand anywhere, as `?start` or `!start` too.
GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
# What an error says beside llguidance's message, if that has these words.
REMEDIES = {
    "Unimplemented keys": 'leave them out, or put "x-guidance": {"lenient": true} into the schema, '
    "which leaves them unheeded",
    "Unknown format": 'leave it out, or put "x-guidance": {"lenient": true} into the schema',
    "coerce_one_of": 'put "x-guidance": {"coerce_one_of": true} into the schema, which takes them '
    "for anyOf",
    "NoExtension": "no text has this form: change it",
}


class Tokenizer(Protocol):
    """What is needed of a tokenizer, such as text.tokenizer's."""

    def to_json(self) -> str | None:
        """The tokenizer as tokenizer.json holds it; None if there is no such form."""


class Grammars:
    """Compiles what requests ask for, once for all that ask for the same.

    `vocab_size`: the model's, which may exceed the tokenizer's. `stop_ids`: tokens that end an
    output. Nothing is loaded before the first request asks.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, stop_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_ids = stop_ids
        self.compile = lru_cache(MOST_KEPT)(self._compile)

    def matcher(self, params: StructuredOutputsParams) -> "Matcher":
        """What holds one completion to its form."""
        return Matcher(self.compile(params).next())

    def fill(self, rows: list[tuple[int, "Matcher", list[int]]], masks: np.ndarray) -> None:
        """For each (row, matcher, output) set masks[row] to what may follow `output`, the tokens so
        far. Each begins with those of the matcher's last call.

        masks [R, ceil(V / 32)] int32, C-contiguous: bit i of word w is set if token 32 * w + i may
        come. Where the output may end, the model's stop ids are among them; where it must, they are
        all. No bit is set once a grammar turns out to be too complex.
        A mask takes up to some milliseconds, so llguidance's threads make them side by side.
        """
        for _, matcher, output in rows:
            matcher.read(output)
        # Each thread gets a run of neighbours. So copies of one start stand together: they wait for
        # one another anyway.
        neighbours = sorted(rows, key=lambda one: one[1].number)
        self._threads.unsafe_compute_mask_ptr(
            [(matcher.state, row) for row, matcher, _ in neighbours],
            masks.ctypes.data,
            masks.strides[0],
            len(masks),
        )
        for row, matcher, _ in rows:
            if matcher.state.is_error():  # a limit of llguidance's
                masks[row] = 0

    def _compile(self, params: StructuredOutputsParams) -> "Starts":
        """Raises ValueError if the form cannot be held to, or nothing has it."""
        return Starts(lambda: self._start(params))

    def _start(self, params: StructuredOutputsParams) -> Any:
        """llguidance's matcher before any token."""
        llguidance, tokens = self._llguidance, self._tokens
        limits = llguidance.LLParserLimits(verbose_errors=False)
        try:
            grammar = to_grammar(llguidance.LLMatcher, params)
            matcher = llguidance.LLMatcher(tokens, grammar, log_level=0, limits=limits)
        except Exception as error:  # its reader of GBNF has errors of its own
            raise ValueError(refusal(params, str(error))) from error
        if not matcher.is_error():
            first = matcher.deep_copy()
            first.compute_bitmask()  # what nothing satisfies is found here
            if not first.is_error():
                return matcher
            matcher = first
        raise ValueError(refusal(params, matcher.get_error()))

    @cached_property
    def _llguidance(self) -> Any:
        try:
            import llguidance
        except ImportError as error:
            raise ValueError(
                f"structured_outputs needs the package llguidance, which cannot be imported "
                f"({error}): {INSTALL}"
            ) from error
        return llguidance

    @cached_property
    def _threads(self) -> Any:
        return self._llguidance.LLExecutor(num_threads=NUM_THREADS)

    @cached_property
    def _tokens(self) -> Any:
        """llguidance's form of the vocabulary: the bytes of each token."""
        text = self._tokenizer.to_json() if self._tokenizer is not None else None
        if text is None:
            raise ValueError(
                "structured_outputs needs to know the text of each token, but the model's folder "
                "has no tokenizer.json: add it"
            )
        if not self._stop_ids:
            raise ValueError(
                "structured_outputs needs a token that ends an output, and the model's folder "
                "names none: give eos_token_id in its generation_config.json"
            )
        try:
            return self._llguidance.LLTokenizer(
                text, n_vocab=self._vocab_size, eos_token=sorted(self._stop_ids)
            )
        except ValueError as error:
            raise ValueError(
                "structured_outputs needs to know the bytes of each token, which llguidance does "
                f"not find in this model's tokenizer.json: use another model ({error})"
            ) from error


class Starts:
    """llguidance's matchers of one grammar, before any token, to be copied.

    Copies of one share what it learns about the grammar's lexer, and wait for one another: two
    threads are no faster with them than one. So there are two for each thread, since some masks
    take long, made when as many completions ask.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._starts = [make()]
        self._count = itertools.count()

    def next(self) -> tuple[int, Any]:
        """A copy for one completion, and the number of what it is a copy of."""
        turn = next(self._count)
        # More turns than there are, where other threads' calls came while one was made.
        if turn >= len(self._starts) and len(self._starts) < 2 * NUM_THREADS:
            self._starts.append(self._make())
        number = turn % len(self._starts)
        return number, self._starts[number].deep_copy()


class Matcher:
    """Reads the tokens of one completion.

    `state`: llguidance's matcher of what was read. `number`: see Starts.
    """

    def __init__(self, start: tuple[int, Any]) -> None:
        self.number, self.state = start
        self._num_read = 0

    def is_complete(self, output: list[int]) -> bool:
        """Whether nothing may follow `output`, which has its form."""
        self.read(output)
        return self.state.is_stopped() and not self.state.is_error()

    def read(self, output: list[int]) -> None:
        """Read what is new in `output`, the tokens so far."""
        new = output[self._num_read :]
        self._num_read += len(new)
        if new:
            self.state.consume_tokens(new)


def to_grammar(compiler: Any, params: StructuredOutputsParams) -> str:
    """llguidance's form of what is asked for. `compiler`: its class LLMatcher."""
    if params.json is not None or params.json_object:
        options: dict[str, Any] = {}
        if params.disable_any_whitespace:
            options["whitespace_flexible"] = False
        if params.whitespace_pattern is not None:
            options["whitespace_pattern"] = params.whitespace_pattern
        schema = params.json if params.json is not None else '{"type": "object"}'
        return compiler.grammar_from_json_schema(schema, overrides=options)
    if params.regex is not None:
        return compiler.grammar_from_regex(params.regex)
    if params.choice is not None:
        # One lexeme, so that one choice may begin with another.
        choices = " | ".join([json.dumps(choice, ensure_ascii=False) for choice in params.choice])
        return compiler.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
    assert params.grammar is not None, "one of the kinds is given"
    if not GBNF_RULE.search(params.grammar):
        return compiler.grammar_from_lark(params.grammar)
    from llguidance.gbnf_to_lark import gbnf_to_lark

    return compiler.grammar_from_lark(gbnf_to_lark(params.grammar))


def refusal(params: StructuredOutputsParams, problem: str) -> str:
    """What a user is told of what cannot be compiled."""
    problem = " ".join(problem.split("\n<non-verbose/>")[0].split())[:500]
    remedies = [remedy for words, remedy in REMEDIES.items() if words in problem]
    return (
        f"structured_outputs.{params.kind} cannot be compiled ({problem}): "
        f"{remedies[0] if remedies else 'change it'}"
    )
