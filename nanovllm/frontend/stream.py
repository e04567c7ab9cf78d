"""Streaming: texts and tokens of requests, piece by piece as steps finish."""

from collections.abc import Iterator

from nanovllm.engine.errors import check_any_succeeded
from nanovllm.engine.request import Request
from nanovllm.frontend.inputs import CheckedInput
from nanovllm.frontend.session import Session

Piece = tuple[
    int, str, list[int], str | None
]  # (index, text, token ids, finish reason): see `LLM.stream`


def stream(session: Session, inputs: list[CheckedInput]) -> Iterator[Piece]:
    """Return an iterator over the pieces of the requests' outputs, for `LLM.stream`.

    Raises ValueError for an input that asks for several completions.
    """
    for i, (_, params, _) in enumerate(inputs):
        if params.n > 1:
            raise ValueError(
                f"sampling_params[{i}].n is {params.n}: stream one completion of a prompt, "
                f"or give it {params.n} times"
            )
    # `_pieces` is a generator. Checks in it would run only when the caller asks for the first item.
    return _pieces(session, inputs)


def _pieces(session: Session, inputs: list[CheckedInput]) -> Iterator[Piece]:
    """Queue requests, run steps until all have ended, and yield what is new after each step."""
    unfinished: dict[int, Request] = {}  # index of the prompt -> its request
    try:
        with session.lock:
            engine = session.begin_call()
            with session.running():
                requests = [engine.add(*one, streams=True, interactive=True) for one in inputs]
                unfinished.update(enumerate(requests))
        num_seen = [len(request.prompt) for request in requests]
        while unfinished:
            session.open_engine()
            with session.lock:
                session.steppable_engine()
                with session.running():
                    session.step()
            # Several tokens may be new, because other calls may run steps between two items.
            for i, request in list(unfinished.items()):
                seq = request.first
                new_ids = seq.token_ids[num_seen[i] :]
                if not new_ids and seq.finish_reason is None:
                    continue
                num_seen[i] += len(new_ids)
                if seq.finish_reason is not None:
                    del unfinished[i]
                text = seq.text.take() if seq.text is not None else ""
                yield i, text, new_ids, seq.finish_reason
        check_any_succeeded(requests)
    finally:  # the caller may stop before the last item
        session.abandon([one for one in unfinished.values() if not one.has_ended])
