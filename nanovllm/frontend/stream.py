"""Stream requests: their texts and tokens piece by piece, as steps finish."""

from collections.abc import Iterator

from nanovllm.engine.errors import check_any_succeeded
from nanovllm.engine.sequence import Sequence
from nanovllm.frontend.inputs import Request
from nanovllm.frontend.session import Session

Piece = tuple[int, str, list[int], str | None]  # as `LLM.stream` describes it


def stream(session: Session, requests: list[Request]) -> Iterator[Piece]:
    """What `LLM.stream` returns. Raises ValueError for a request of several completions."""
    for i, (_, params, _) in enumerate(requests):
        if params.n > 1:
            raise ValueError(
                f"sampling_params[{i}].n is {params.n}: stream one completion of a prompt, "
                f"or give it {params.n} times"
            )
    return _pieces(session, requests)  # a generator, which would refuse only when it is read


def _pieces(session: Session, requests: list[Request]) -> Iterator[Piece]:
    unfinished: dict[int, Sequence] = {}  # by the prompt's index
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
            # More than one token may be new: other calls may run steps between two items.
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
    finally:  # the caller may want no more items
        session.abandon([seq for seq in unfinished.values() if seq.finish_reason is None])
