"""Streaming: texts and tokens of requests, piece by piece as steps finish."""

from collections.abc import Iterator

from nanovllm.engine.errors import check_any_succeeded
from nanovllm.engine.sequence import Sequence
from nanovllm.frontend.inputs import Request
from nanovllm.frontend.session import Session

Piece = tuple[
    int, str, list[int], str | None
]  # (index, text, token ids, finish reason): see `LLM.stream`


def stream(session: Session, requests: list[Request]) -> Iterator[Piece]:
    """Return an iterator over the pieces of the requests' outputs, for `LLM.stream`.

    Raises ValueError for a request of several completions.
    """
    for i, (_, params, _) in enumerate(requests):
        if params.n > 1:
            raise ValueError(
                f"sampling_params[{i}].n is {params.n}: stream one completion of a prompt, "
                f"or give it {params.n} times"
            )
    # `_pieces` is a generator. Checks in it would run only when the caller asks for the first item.
    return _pieces(session, requests)


def _pieces(session: Session, requests: list[Request]) -> Iterator[Piece]:
    """Queue the requests, run steps until all have ended, and yield what is new after each step."""
    unfinished: dict[int, Sequence] = {}  # index of the prompt -> its sequence
    try:
        with session.lock:
            engine = session.begin_call()
            with session.running():
                sequences = [
                    engine.add(*request, streams=True, interactive=True) for request in requests
                ]
                unfinished.update(enumerate(sequences))
        num_seen = [seq.num_prompt_tokens for seq in sequences]
        while unfinished:
            session.open_engine()
            with session.lock:
                session.steppable_engine()
                with session.running():
                    session.step()
            # Several tokens may be new, because other calls may run steps between two items.
            for i, seq in list(unfinished.items()):
                new_ids = seq.token_ids[num_seen[i] :]
                if not new_ids and seq.finish_reason is None:
                    continue
                num_seen[i] += len(new_ids)
                if seq.finish_reason is not None:
                    del unfinished[i]
                text = seq.text.take() if seq.text is not None else ""
                yield i, text, new_ids, seq.finish_reason
        check_any_succeeded(sequences)
    finally:  # the caller may stop before the last item
        session.abandon([seq for seq in unfinished.values() if seq.finish_reason is None])
