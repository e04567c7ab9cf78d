"""Errors of an engine: a call that cannot run now, a lost rank, or wrong logits in a step."""

from nanovllm.engine.sequence import Sequence


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
    """The model computed NaN or infinite logits, or a request's constraints bar every token.

    request_ids: whose, in this step.
    """

    def __init__(self, sequences: list[Sequence]) -> None:
        """`sequences`: those that this befell. The message is about the first."""
        self.request_ids = {seq.request.id for seq in sequences}
        first = sequences[0]
        where = f"after {len(first.token_ids)} tokens"
        problem = (
            f"has NaN or infinite logits {where}: try another dtype, such as bfloat16 or float32, "
            "or check the checkpoint's weights"
        )
        if first.constraint is not None or first.params.edits_logits:
            has_form = first.params.structured_outputs is not None
            also = ", or the form in structured_outputs is too complex: simplify it"
            problem = (
                f"has no token to go on with {where}: its constraints (such as bad_words, "
                "allowed_token_ids, logits_processors) bar them all, so loosen them"
                f"{also if has_form else ''}; or the model computed NaN or infinite logits"
            )
        begin = ", ".join(map(str, first.token_ids[: min(8, first.num_prompt_tokens)]))
        dots = ", ..." if first.num_prompt_tokens > 8 else ""
        super().__init__(f"request {first.request.id} (prompt [{begin}{dots}]) {problem}")
