"""The answers of a rank to its engine, and the bytes that carry them.

No part of an answer is pickled, because unpickling runs whatever code a message names. An answer is
a sequence of fields, the first of which names the kind of the answer. A field is plain bytes: text,
integers, or the elements of an array. The number of fields and their lengths precede them. The
engine checks all of an answer and accepts no malformed one.
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
PAIR_BYTES = 8  # a record of log-probabilities has pairs of a token id and a value, 32 bits each


@dataclass(frozen=True, slots=True)
class Ready:
    """A rank's answer to Start: the model is loaded and the KV cache is allocated."""

    info: RunnerInfo


@dataclass(frozen=True, slots=True)
class Done:
    """A rank's answer to any other command: the command of number `step` is done."""

    step: int
    result: StepResult | np.ndarray | None = None
    error: str = ""  # the message of the ValueError that a task raised


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank's last answer: the error that it raised."""

    error: str
    traceback: str
    is_users: bool  # the error is a ValueError: the user asked for something that cannot be done


Answer = Ready | Done | Failed


class MalformedAnswer(Exception):
    """An error that says why some bytes are not the answer of a rank."""


def pack_answer(answer: Answer) -> bytes:
    """Encode an answer as bytes."""
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
    """Decode an answer. Raises MalformedAnswer if the bytes are not one."""
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
    if rows < 0 or columns < 0:  # `reshape` would take -1 for a size that it has to work out
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
    """Join fields: their number and their lengths as integers, then the fields."""
    return b"".join((encode_integers([len(fields), *map(len, fields)]), *fields))


def split_fields(data: bytes) -> list[bytes]:
    """Split what `join_fields` joined. Raises ValueError if the lengths do not fit the data."""
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
    # An error may name a file whose name is not valid text.
    return text.encode("utf-8", "surrogatepass")


def decode_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")
