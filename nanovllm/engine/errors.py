"""Errors of an engine: calls that cannot run now, lost ranks, sequences without a next token."""

import logging

from nanovllm.engine.sequence import Sequence

logger = logging.getLogger("nanovllm")


class ClosedError(ValueError):
    """The LLM was used after `close`, or closed while the call ran."""

    def __init__(self) -> None:
        super().__init__("this LLM is closed: make a new one")


class AsleepError(ValueError):
    """The LLM was used between `sleep` and `wake_up`."""

    def __init__(self) -> None:
        super().__init__("this LLM is asleep: call wake_up first")


class RankError(RuntimeError):
    """A rank died, raised or hung. All ranks are gone, and the LLM with them: make a new one."""


class InvalidLogitsError(FloatingPointError):
    """Every request of a call ended with an error."""


def explain(seq: Sequence) -> str:
    """Say why no token could be sampled for a sequence, and what to do. The text depends on
    nothing but the request, so that a job that is run again says the same.
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
        f"there is no token to go on with {where}: the request's constraints (such as bad_words, "
        "allowed_token_ids, logits_processors) bar them all, so loosen them"
        f"{also if has_form else ''}; or the model computed NaN or infinite logits"
    )


def warn(seq: Sequence) -> None:
    """Log that a sequence ended with an error."""
    logger.warning(
        f"nanovllm: {_name(seq)} ended with an error: {seq.error}. The others go on. Its output "
        "has finish_reason='error'; further errors of this call are not logged"
    )


def check_any_succeeded(requests: list[Sequence]) -> None:
    """Raise InvalidLogitsError if there are requests, and all completions of all of them ended
    with an error.
    """
    sequences = [seq for request in requests for seq in request.completions]
    if not sequences or any([seq.finish_reason != "error" for seq in sequences]):
        return
    others = len(requests) - 1
    also = f"; the call's {others} other requests ended with an error, too" if others else ""
    raise InvalidLogitsError(f"{_name(requests[0])}: {requests[0].error}{also}")


def _name(seq: Sequence) -> str:
    begin = ", ".join(map(str, seq.token_ids[: min(8, seq.num_prompt_tokens)]))
    dots = ", ..." if seq.num_prompt_tokens > 8 else ""
    return f"request {seq.request.id} (prompt [{begin}{dots}])"
