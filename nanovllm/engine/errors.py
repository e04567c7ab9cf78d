"""The errors of an engine: calls that cannot run now, lost ranks, sequences without a token."""

import logging

from nanovllm.engine.request import Request
from nanovllm.engine.sequence import Sequence

logger = logging.getLogger("nanovllm")


class ClosedError(ValueError):
    """A call came after `close`, or ran while another thread closed the LLM."""

    def __init__(self) -> None:
        super().__init__("this LLM is closed: make a new one")


class AsleepError(ValueError):
    """A call came between `sleep` and `wake_up`."""

    def __init__(self) -> None:
        super().__init__("this LLM is asleep: call wake_up first")


class RankError(RuntimeError):
    """A rank died, raised an error or hung. All ranks have ended, so a new LLM must be made."""


class InvalidLogitsError(FloatingPointError):
    """Every request of a call ended with finish_reason "error"."""


def explain(seq: Sequence) -> str:
    """Return a message that says why no token could be sampled for a sequence, and the remedy.

    The message depends on nothing but the request, so it is the same if a job is run again.
    """
    where = f"after {len(seq.token_ids)} tokens of prompt and output"
    if seq.constraint is None and not seq.params.edits_logits:
        return (
            f"the model computed NaN or infinite logits {where}: try another dtype, such as "
            "bfloat16 or float32, or check the checkpoint's weights"
        )
    has_form = seq.params.structured_outputs is not None
    also = ", or the form in structured_outputs is too complex: simplify it"
    return (
        f"no token can come next {where}: the request's constraints (such as bad_words, "
        "allowed_token_ids, logits_processors) bar all tokens, so loosen the constraints"
        f"{also if has_form else ''}; or the model computed NaN or infinite logits"
    )


def warn(seq: Sequence) -> None:
    """Log that a sequence ended with an error."""
    logger.warning(
        f"nanovllm: {_name(seq.request)} ended with an error: {seq.error}. The output of this "
        "request has finish_reason='error'. Other requests continue; further errors of this call "
        "are not logged"
    )


def check_any_succeeded(requests: list[Request]) -> None:
    """Raise InvalidLogitsError if all completions of all requests ended with an error.

    A call without requests raises nothing.
    """
    sequences = [seq for request in requests for seq in request.completions]
    if not sequences or any([seq.finish_reason != "error" for seq in sequences]):
        return
    others = len(requests) - 1
    also = f"; the {others} other requests of the call ended with an error, too" if others else ""
    raise InvalidLogitsError(f"{_name(requests[0])}: {sequences[0].error}{also}")


def _name(request: Request) -> str:
    """Name a request by its id and the first tokens of its prompt."""
    begin = ", ".join(map(str, request.prompt[:8]))
    dots = ", ..." if len(request.prompt) > 8 else ""
    return f"request {request.id} (prompt [{begin}{dots}])"
