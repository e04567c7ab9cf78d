"""Structured outputs: the tokens that may come next in an output that must have a given form.

llguidance (https://github.com/guidance-ai/llguidance), an optional package, does the work. It
parses the output so far by Earley's algorithm, and walks a trie of the vocabulary along the texts
that its lexer allows. It compiles a form in about a millisecond, because it computes masks only
when they are needed.

Grammars holds the compiled form of each grammar as Starts: a few of llguidance's matchers that have
read no token. Each completion has a Matcher, which copies one of them.

This file knows texts, tokens and bitmasks. It knows nothing of steps, blocks and tensors.
"""

import itertools
import json
import os
import re
from collections.abc import Callable
from functools import cached_property, partial
from threading import Lock
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np

from nanovllm.features.sampling.closed_objects import close_objects
from nanovllm.sampling_params import StructuredOutputsParams

CACHE_BYTES = 512 << 20  # bytes of compiled forms that no request is using
# A lexer learns states while masks are made, and fails where it would learn more than its limit.
# Most forms never reach the first limit; after a failure it is four times as high, up to
# MOST_STATES. For a vocabulary of 150,000, a full lexer took 0.9 to 1.2 KB a state, and a form that
# was just compiled up to 60 bytes for each character of the request (llguidance 1.9.1, AMD EPYC).
FIRST_STATES = 1024
MOST_STATES = 16384
STATE_BYTES = 1200
CHARACTER_BYTES = 64
# The default whitespace between two parts of JSON: at most one line break, then 20 blanks.
WHITESPACE = r"(\r?\n)?[ \t]{0,20}"
OF_WHITESPACE = {"whitespace_pattern", "whitespace_flexible"}  # in a schema's "x-guidance"
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
NUM_THREADS = max(1, min(32, CORES * 4 // 5))  # threads that make masks
# How often a completion begins anew after an error of its lexer. The first new lexer may already be
# full, because other completions use it too; further attempts raise the limit up to the highest.
ATTEMPTS = 4
INSTALL = 'pip install -e ".[structured]"'
# No line of a Lark grammar begins like this. Lark's `start` may stand anywhere, and as `?start`.
GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
# Words of llguidance's messages, and the remedy that an error adds to them.
REMEDIES = {
    "Unimplemented keys": 'leave them out, or put "x-guidance": {"lenient": true} into the schema, '
    "which leaves them unheeded",
    "Unknown format": 'leave it out, or put "x-guidance": {"lenient": true} into the schema',
    "coerce_one_of": 'put "x-guidance": {"coerce_one_of": true} into the schema, which takes them '
    "for anyOf",
    "NoExtension": "no text has this form: change it",
}


class Tokenizer(Protocol):
    """The part of a tokenizer that grammars need; frontend/tokenizer.py has it."""

    def to_json(self) -> str | None:
        """Return the contents of tokenizer.json; None if the model has no such file."""


class Grammars:
    """The compiled forms of all requests. Requests with the same form share one.

    A form stays as long as completions with it run. Beyond that, the forms that were used last are
    kept, up to CACHE_BYTES bytes. llguidance is not loaded before the first request needs it.

    vocab_size: of the model, which may exceed that of the tokenizer.
    stop_ids: the tokens that end an output.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, stop_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_ids = stop_ids
        self._known: WeakValueDictionary[StructuredOutputsParams, Starts] = WeakValueDictionary()
        self._kept: dict[StructuredOutputsParams, Starts] = {}  # the last used last
        self._lock = Lock()  # threads may check requests side by side

    def compile(self, params: StructuredOutputsParams) -> "Starts":
        """Return the compiled form. Raises ValueError for a form that cannot be enforced."""
        starts = self._known.get(params)
        if starts is None:
            make = partial(self._start, params)
            starts = Starts(make, num_characters(params), self._forget_the_oldest)
        with self._lock:
            self._known[params] = starts
            self._kept.pop(params, None)
            self._kept[params] = starts
        self._forget_the_oldest()
        return starts

    def _forget_the_oldest(self) -> None:
        """Drop the forms that were used least recently, until CACHE_BYTES bytes hold the others.

        The form that was used last always stays.
        """
        with self._lock:
            while len(self._kept) > 1 and self.num_bytes > CACHE_BYTES:
                del self._kept[next(iter(self._kept))]

    @property
    def num_bytes(self) -> int:
        """An upper bound of the bytes that the kept forms take."""
        return sum([starts.num_bytes for starts in self._kept.values()])

    def matcher(self, params: StructuredOutputsParams) -> "Matcher":
        """Make the object that enforces the form of one completion."""
        return Matcher(partial(self._begin, params))

    def _begin(self, params: StructuredOutputsParams) -> tuple["Starts", int, Any]:
        """Return a form's starts, and the number and the matcher of the start to copy."""
        starts = self.compile(params)
        return starts, *starts.next()

    def fill(self, rows: list[tuple[int, "Matcher", list[int]]], masks: np.ndarray) -> None:
        """Set masks[row] to the tokens that may come next, for each (row, matcher, output so far).

        An output begins with the tokens of the matcher's last call.

        masks [R, ceil(V / 32)] int32, C-contiguous: bit i of word w is set if token 32 * w + i may
        come next. If the output may end, the bits of the model's stop ids are set; if it must end,
        no others are. If a grammar turns out to be too complex, no bit is set. A mask can take
        milliseconds, so llguidance's threads make several at the same time.
        """
        for _, matcher, output in rows:
            matcher.read(output)
        self._compute(rows, masks)
        for _ in range(ATTEMPTS):
            failed = [one for one in rows if one[1].state.is_error()]
            if not failed:
                return
            for _, matcher, output in failed:
                matcher.begin_anew(output)
            self._compute(failed, masks)
        for row, matcher, _ in failed:
            if matcher.state.is_error():  # another limit of llguidance's
                masks[row] = 0

    def _compute(self, rows: list[tuple[int, "Matcher", list[int]]], masks: np.ndarray) -> None:
        """Make the masks of matchers that have read their outputs."""
        # Each thread gets a run of neighbours. So copies of one start stand together: they wait for
        # one another anyway.
        neighbours = sorted(rows, key=lambda one: one[1].number)
        self._threads.unsafe_compute_mask_ptr(
            [(matcher.state, row) for row, matcher, _ in neighbours],
            masks.ctypes.data,
            masks.strides[0],
            len(masks),
        )

    def _start(self, params: StructuredOutputsParams, num_states: int) -> Any:
        """Make a matcher of llguidance that has read no token. Its lexer may learn `num_states`.

        Raises ValueError if the form cannot be enforced, or if no text has it.
        """
        llguidance, tokens = self._llguidance, self._tokens
        limits = llguidance.LLParserLimits(verbose_errors=False, max_lexer_states=num_states)
        try:
            grammar = to_grammar(llguidance.LLMatcher, params)
            matcher = llguidance.LLMatcher(tokens, grammar, log_level=0, limits=limits)
        except Exception as error:  # its reader of GBNF has errors of its own
            raise ValueError(refusal(params, str(error))) from error
        if not matcher.is_error():
            first = matcher.deep_copy()
            first.compute_bitmask()  # an error here: no text has the form
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
        """The vocabulary as llguidance takes it: the bytes of each token."""
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
    """Matchers of llguidance for one grammar that have read no token. Completions copy them.

    Copies of one matcher share a lexer and its states, and wait for one another: on such copies,
    two threads are no faster than one. Some masks take long, so a grammar may have two matchers for
    each thread, or fewer if so many could exceed CACHE_BYTES. A new one is made for a further
    completion, until there are so many; then completions take turns.
    """

    def __init__(
        self, make: Callable[[int], Any], num_characters: int, grown: Callable[[], None]
    ) -> None:
        """Make the first matcher.

        Args:
            make: makes a matcher. Its argument is the number of states that the lexer may learn.
            num_characters: the length of the grammar's text.
            grown: called when the matchers may take more bytes than before.
        """
        self._make = make
        self._grown = grown
        self._grammar_bytes = CHARACTER_BYTES * num_characters
        self._most = max(1, min(2 * NUM_THREADS, CACHE_BYTES // self._num_bytes(MOST_STATES)))
        self._num_states = min(FIRST_STATES, MOST_STATES)
        self._starts = [self._first()]
        self._limits = [self._num_states]  # the most states of each matcher's lexer
        self._count = itertools.count()

    def _first(self) -> Any:
        while True:
            try:
                return self._make(self._num_states)
            except ValueError:  # the first mask may need more states
                if self._num_states == MOST_STATES:
                    raise
            self._allow_more_states(self._num_states)

    def _allow_more_states(self, num_states: int) -> None:
        """Raise the limit of states for new starts, because `num_states` were too few."""
        self._num_states = max(self._num_states, min(4 * num_states, MOST_STATES))

    def _num_bytes(self, num_states: int) -> int:
        return num_states * STATE_BYTES + self._grammar_bytes

    @property
    def num_bytes(self) -> int:
        """An upper bound of the bytes that the starts take."""
        return sum(map(self._num_bytes, self._limits))

    def next(self) -> tuple[int, Any]:
        """Return the number and the matcher of the start that the next completion copies."""
        turn = next(self._count)
        # `turn` may be beyond the list: other threads may have called while a matcher was made.
        if turn >= len(self._starts) and len(self._starts) < self._most:
            self._starts.append(self._make(self._num_states))
            self._limits.append(self._num_states)
            self._grown()
        number = turn % len(self._starts)
        return number, self._starts[number]

    def replace(self, number: int, old: Any) -> Any:
        """Return the start with this number; make it anew first if it still is `old`."""
        if self._starts[number] is old:
            self._allow_more_states(self._limits[number])
            self._starts[number] = self._make(self._num_states)
            self._limits[number] = self._num_states
            self._grown()
        return self._starts[number]


class Matcher:
    """The reader of one completion's tokens.

    It looks its form up when it reads for the first time, so that waiting requests hold no form.

    state: llguidance's matcher of the tokens that have been read.
    number: The number, in Starts, of the matcher that `state` was copied from.
    """

    def __init__(self, begin: Callable[[], tuple[Starts, int, Any]]) -> None:
        self._begin = begin
        self._starts: Starts | None = None
        self._source: Any = None  # the matcher that `state` was copied from
        self._num_read = 0
        self.number = 0
        self.state: Any = None

    def is_complete(self, output: list[int]) -> bool:
        """Tell whether `output` has its form and nothing may follow it."""
        self.read(output)
        return self.state.is_stopped() and not self.state.is_error()

    def may_end(self, output: list[int]) -> bool:
        """Tell whether `output` has its form, whatever may follow."""
        self.read(output)
        return self.state.is_accepting()

    def read(self, output: list[int]) -> None:
        """Read what is new in `output`, the tokens so far."""
        if self._starts is None:
            self._starts, self.number, self._source = self._begin()
            self.state = self._source.deep_copy()
        self._consume(output)
        for _ in range(ATTEMPTS):
            if self.state.is_error():
                self.begin_anew(output)

    def begin_anew(self, output: list[int]) -> None:
        """Read `output` again with a new matcher, after an error.

        Earlier completions may have used up all the states that the lexer may learn.
        """
        assert self._starts is not None, "it has read"
        self._source = self._starts.replace(self.number, self._source)
        self.state, self._num_read = self._source.deep_copy(), 0
        self._consume(output)

    def _consume(self, output: list[int]) -> None:
        new = output[self._num_read :]
        self._num_read += len(new)
        if new:
            self.state.consume_tokens(new)


def num_characters(params: StructuredOutputsParams) -> int:
    """Return the length of the text that says what the form is."""
    texts = params.json, params.regex, params.grammar, *(params.choice or ())
    return sum([len(text) for text in texts if isinstance(text, str)])


def to_grammar(compiler: Any, params: StructuredOutputsParams) -> str:
    """Convert the form that `params` ask for into a grammar of llguidance.

    `compiler`: llguidance's class LLMatcher.
    """
    if params.json is not None or params.json_object:
        # SamplingParams keep a schema as text.
        schema = json.loads(str(params.json)) if params.json is not None else {"type": "object"}
        if params.disable_additional_properties:
            schema = close_objects(schema)
        whitespace = "" if params.disable_any_whitespace else params.whitespace_pattern
        own = schema.get("x-guidance")
        says_itself = isinstance(own, dict) and not OF_WHITESPACE.isdisjoint(own)
        if whitespace is None and not says_itself:
            whitespace = WHITESPACE
        overrides = {} if whitespace is None else {"whitespace_pattern": whitespace}
        return compiler.grammar_from_json_schema(json.dumps(schema), overrides=overrides)
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
    """Make the error message for a form that cannot be compiled."""
    problem = " ".join(problem.split("\n<non-verbose/>")[0].split())[:500]
    remedies = [remedy for words, remedy in REMEDIES.items() if words in problem]
    return (
        f"structured_outputs.{params.kind} cannot be compiled ({problem}): "
        f"{remedies[0] if remedies else 'change it'}"
    )
