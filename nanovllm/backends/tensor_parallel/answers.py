"""What a rank answers its engine, and the bytes that carry it.

Nothing of an answer is unpickled, since pickle runs whatever code a message names. An answer is a
sequence of fields, the first of which names its kind. A field is plain bytes: text, integers, or an
array's elements. Before the fields stand their number and their lengths. The engine checks all of
it, and takes no other answer.
"""

import json
import struct
from array import array
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import get_type_hints

import numpy as np

from nanovllm.engine.batch import RunnerInfo, StepResult

INTEGER = "q"  # 64 bits, as both processes of one machine store them
INTEGER_BYTES = array(INTEGER).itemsize
PAIR_BYTES = 8  # of a record of log-probabilities: a token id and a value, of 32 bits each


@dataclass(frozen=True, slots=True)
class Ready:
    """From a rank: the model is loaded and the KV cache is allocated."""

    info: RunnerInfo


@dataclass(frozen=True, slots=True)
class Done:
    """From a rank: the command of this number is done."""

    step: int
    result: StepResult | np.ndarray | None = None
    error: str = ""  # of a task: the ValueError that it raised


@dataclass(frozen=True, slots=True)
class Failed:
    """From a rank, last of all: what it raised."""

    error: str
    traceback: str
    is_users: bool  # a ValueError: the user asked for something that cannot be


Answer = Ready | Done | Failed


class MalformedAnswer(Exception):
    """Bytes that are no answer of a rank."""


def pack_answer(answer: Answer) -> bytes:
    if isinstance(answer, Ready):
        return join_fields([b"ready", json.dumps(asdict(answer.info)).encode()])
    if isinstance(answer, Failed):
        texts = [encode_text(text) for text in (answer.error, answer.traceback)]
        return join_fields([b"failed", *texts, encode_integers([answer.is_users])])
    step, result = encode_integers([answer.step]), answer.result
    if result is None:
        return join_fields([b"done", step, encode_text(answer.error)])
    if isinstance(result, np.ndarray):
        assert result.dtype == np.float32 and result.ndim == 2
        return join_fields([b"logits", step, encode_integers(result.shape), result.tobytes()])
    places = encode_integers(result.logprobs)
    records = (*result.logprobs.values(), *result.prompt_logprobs)
    return join_fields([b"sampled", step, encode_integers(result.tokens), places, *records])


def unpack_answer(data: bytes) -> Answer:
    """Read an answer. Raises MalformedAnswer for anything else."""
    try:
        kind, *fields = split_fields(data)
        return READERS[kind](*fields)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise MalformedAnswer(f"{type(error).__name__}: {error}") from error


def read_ready(info: bytes) -> Ready:
    values = json.loads(info)
    declared = get_type_hints(RunnerInfo)
    if {name: type(value) for name, value in values.items()} != declared:
        raise ValueError(f"a runner's values are {values}")
    return Ready(RunnerInfo(**values))


def read_done(step: bytes, error: bytes) -> Done:
    return Done(decode_integer(step), error=decode_text(error))


def read_failed(error: bytes, traceback: bytes, is_users: bytes) -> Failed:
    return Failed(decode_text(error), decode_text(traceback), bool(decode_integer(is_users)))


def read_logits(step: bytes, shape: bytes, values: bytes) -> Done:
    rows, columns = decode_integers(shape)
    logits = np.frombuffer(values, np.float32).copy()  # a user's processor may write to it
    if rows < 0 or columns < 0:  # which `reshape` would work out
        raise ValueError(f"logits have the shape [{rows}, {columns}]")
    return Done(decode_integer(step), logits.reshape(rows, columns))


def read_sampled(step: bytes, tokens: bytes, places: bytes, *records: bytes) -> Done:
    token_ids, indices = decode_integers(tokens), decode_integers(places)
    if indices and not 0 <= min(indices) <= max(indices) < len(token_ids):
        raise ValueError(f"{len(token_ids)} tokens have log-probabilities at {indices}")
    lengths = {*map(len, records)}
    if len(records) < len(indices) or any(length % PAIR_BYTES for length in lengths):
        raise ValueError(f"{len(records)} records of log-probabilities have {lengths} bytes")
    logprobs = dict(zip(indices, records))
    result = StepResult(token_ids, logprobs, records[len(indices) :])
    return Done(decode_integer(step), result)


READERS: dict[bytes, Callable[..., Answer]] = {
    b"ready": read_ready,
    b"done": read_done,
    b"failed": read_failed,
    b"logits": read_logits,
    b"sampled": read_sampled,
}


def join_fields(fields: list[bytes]) -> bytes:
    return b"".join((encode_integers([len(fields), *map(len, fields)]), *fields))


def split_fields(data: bytes) -> list[bytes]:
    count = decode_integer(data[:INTEGER_BYTES])
    begin = (1 + count) * INTEGER_BYTES
    if not 0 < begin <= len(data):
        raise ValueError(f"{len(data)} bytes hold {count} fields")
    lengths = decode_integers(data[INTEGER_BYTES:begin])
    if min(lengths, default=0) < 0 or begin + sum(lengths) != len(data):
        raise ValueError(f"{len(data)} bytes hold fields of {lengths} bytes")
    return [*struct.unpack_from("%ds" * count % tuple(lengths), data, begin)]


def encode_integers(values: Iterable[int]) -> bytes:
    return array(INTEGER, values).tobytes()


def decode_integers(data: bytes) -> list[int]:
    values = array(INTEGER)
    values.frombytes(data)
    return values.tolist()


def decode_integer(data: bytes) -> int:
    (value,) = decode_integers(data)
    return value


def encode_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # an error may name a file whose name is no text


def decode_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")
