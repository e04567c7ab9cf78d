"""The recorded runs of a GPU for chapters 9, 10 and 12. recording.py measures them."""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.features.trace.events import Event
from nanovllm.features.trace.files import read_jsonl

FOLDER = Path(__file__).with_name("recorded_h200")


class DecodeTime(NamedTuple):
    """The measured time of decode steps."""

    sequences: int
    context: int  # tokens of each sequence, in the middle of the measured steps
    seconds: float

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """The step as chunks: tokens that are computed before and in this step."""
        return [(self.context - 1, 1)] * self.sequences


@cache
def figures() -> dict[str, Any]:
    """Read all figures. The keys are those that recording.py gives them."""
    return json.loads((FOLDER / "figures.json").read_text("utf-8"))


def decode_times(model: str) -> list[DecodeTime]:
    """List the decode steps that were measured for a model: "qwen3-0.6b" or "qwen3-8b"."""
    return [
        DecodeTime(step["sequences"], step["context"], step["step_us"] / 1e6)
        for step in figures()[f"{model} decode"]["steps"]
    ]


def trace(chapter: int) -> list[Event]:
    """Read the trace of a chapter."""
    return read_jsonl(FOLDER / f"{chapter}.jsonl")
