"""The drawings of the course, made from the chapters' runs.

`python -m nanovllm.apps.course.drawings` writes them anew into docs/course, as SVG. They count
steps, tokens and blocks, or show the times that a GPU recorded, so every machine draws the same.
"""

import math
from collections.abc import Callable
from html import escape

import torch

from nanovllm.apps.course import recorded as measured
from nanovllm.apps.course import runs
from nanovllm.apps.course.runs import Cell
from nanovllm.apps.course.skeleton import CHAPTERS
from nanovllm.apps.course.solution.model import Model
from nanovllm.apps.course.solution.one_token import causal_attention
from nanovllm.apps.course.solution.sampler import uniform_noise
from nanovllm.features.trace.events import Event, Launched, Preempted, Registered
from nanovllm.features.trace.replay import Replay

# Colours that differ for the colour-blind, too (Okabe and Ito 2008).
COLOURS = [
    "#56b4e9",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#0072b2",
    "#d55e00",
    "#b9a500",
    "#7f7f7f",
    "#8c564b",
]
INK, PALE = "#222222", "#e8e8e8"


class Drawing:
    """An SVG picture of 760 pixels width."""

    def __init__(self, height: int, title: str) -> None:
        self.height = height
        self.title = title
        self.parts: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, **more: object
    ) -> None:
        attributes = "".join(f' {name.replace("_", "-")}="{more[name]}"' for name in more)
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{fill}"{attributes}/>'
        )

    def text(self, x: float, y: float, text: str, anchor: str = "start", size: int = 13) -> None:
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">'
            f"{escape(text)}</text>"
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str = INK) -> None:
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'
        )

    def circle(self, x: float, y: float, radius: float, fill: str) -> None:
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}"/>')

    def __str__(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {self.height}" width="760" '
            f'height="{self.height}" font-family="sans-serif" fill="{INK}" role="img">'
        )
        white = f'<rect width="760" height="{self.height}" fill="#ffffff"/>'
        return "\n".join(
            [head, f"<title>{escape(self.title)}</title>", white, *self.parts, "</svg>\n"]
        )


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def staircase() -> Drawing:
    """Draw how many tokens each of the first 24 steps computes: chapters 1 and 2."""
    drawing = Drawing(300, "Tokens that the model computes for each token of the output")
    panels = (
        (0, runs.one_token_by_hand, "without a cache: all tokens so far, for each new token"),
        (390, runs.kv_cache, "with a KV cache: the prompt, then one token each"),
    )
    for left, run, label in panels:
        counts = [runs.tokens_of(step) for step in runs.launches(run().traces[0])][:24]
        drawing.text(left + 10, 22, label)
        for i, count in enumerate(counts):
            new = count if i == 0 else 1
            drawing.rect(left + 10 + i * 14, 266 - count * 6, 12, (count - new) * 6, COLOURS[0])
            drawing.rect(left + 10 + i * 14, 266 - new * 6, 12, new * 6, COLOURS[1])
        drawing.line(left + 8, 267, left + 348, 267)
        drawing.text(
            left + 178, 285, "24 steps; orange: tokens that are new to the model", "middle", 12
        )
    return drawing


def blocks_of_sequences() -> Drawing:
    """Draw the block tables and the memory at the fullest step of chapter 3."""
    (events,) = runs.paged_attention().traces
    best, state = 0, None
    replay = Replay(runs.run_of(events))
    for event in events[1:]:
        replay.apply(event)
        used = sum(count > 0 for count in replay.ref_counts)
        if isinstance(event, Launched) and used > best:
            best = used
            state = event.step, {s: list(t) for s, t in replay.tables.items()}, {**replay.lengths}
    assert state is not None
    step, tables, lengths = state
    drawing = Drawing(330, "Block tables of four sequences, and the memory of 24 blocks")
    drawing.text(10, 22, f"block tables in step {step}: the blocks of each sequence, in its order")
    owner: dict[int, tuple[int, float]] = {}  # block -> (row, share that is filled)
    for row, (seq, table) in enumerate(sorted(tables.items())):
        y = 36 + row * 40
        drawing.text(10, y + 20, f"sequence {seq}: {lengths[seq]} tokens")
        for i, block in enumerate(table):
            assert block is not None
            filled = min(1.0, max(0.0, lengths[seq] / 16 - i))
            owner[block] = row, filled
            drawing.rect(190 + i * 70, y, 64, 30, PALE, stroke=INK)
            drawing.rect(190 + i * 70, y, 64 * filled, 30, colour(row))
            drawing.text(222 + i * 70, y + 20, f"{block}", "middle")
    drawing.text(10, 222, "memory: 24 blocks of 16 slots (white: free; grey: slots still empty)")
    for block in range(24):
        x, y = 10 + block % 12 * 62, 236 + block // 12 * 42
        row, filled = owner.get(block, (-1, 0.0))
        drawing.rect(x, y, 56, 30, PALE if row >= 0 else "#ffffff", stroke=INK)
        if row >= 0:
            drawing.rect(x, y, 56 * filled, 30, colour(row))
        drawing.text(x + 28, y + 20, f"{block}", "middle")
    return drawing


def draw_slots(drawing: Drawing, top: float, found: list[Cell], first_step: int) -> None:
    """Draw a row for each batch slot and a column for each step."""
    for cell in found:
        x, y = 60 + (cell.step - first_step) * 11.5, top + cell.slot * 28
        fill = colour(cell.seq % 9)
        drawing.rect(x, y, 10.5, 22, fill, **({"stroke": INK} if cell.is_prefill else {}))
    for slot in range(3):
        drawing.text(10, top + slot * 28 + 16, f"slot {slot}", size=12)


def static_and_continuous() -> Drawing:
    """Draw which request holds which slot in each step of chapter 4."""
    (events,) = runs.continuous_batching().traces
    found, count = runs.cells(events), len(runs.STATIC)
    begin = min(cell.step for cell in found if cell.seq == count)
    end = max(cell.step for cell in found) + 1
    drawing = Drawing(262, "Nine requests in three slots: static and continuous batching")
    drawing.text(10, 20, f"in batches of three: {begin} steps (each colour is a request)")
    draw_slots(drawing, 30, [cell for cell in found if cell.step < begin], 0)
    drawing.text(10, 146, f"continuously: {end - begin} steps (a frame: the prompt is computed)")
    draw_slots(drawing, 156, [cell for cell in found if cell.step >= begin], begin)
    drawing.line(60, 245, 60 + 60 * 11.5, 245)
    drawing.text(60, 258, "steps", size=12)
    return drawing


def budgets() -> Drawing:
    """Draw how many tokens each step of chapter 5 computes."""
    small, large = runs.chunked_prefill().traces
    drawing = Drawing(300, "Tokens of each step, with a budget of 1,024 and of 64 tokens")
    for left, events, label in ((0, large, "budget 1024"), (390, small, "budget 64")):
        drawing.text(left + 10, 22, f"{label}: tokens of each step")
        for i, step in enumerate(runs.launches(events)[:24]):
            decode, total = step.decode_tokens, runs.tokens_of(step)
            x, scale = left + 40 + i * 13, 0.42
            height = (total - decode) * scale
            drawing.rect(x, 260 - height, 11, height, COLOURS[1])
            drawing.rect(x, 260, 11, decode * 2, COLOURS[0])
        for tokens in (0, 256, 512):
            drawing.text(left + 34, 264 - tokens * 0.42, f"{tokens}", "end", 11)
        drawing.line(left + 38, 260, left + 352, 260)
        drawing.text(left + 40, 288, "above: tokens of prompts; below: decoding", size=12)
    return drawing


def shared_blocks() -> Drawing:
    """Draw the blocks that three sequences share in chapter 6, with hashes and counts."""
    events = runs.prefix_cache().traces[0]
    replay, hashes, best, state = Replay(runs.run_of(events)), dict[int, str](), 0, None
    for event in events[1:]:
        replay.apply(event)
        if isinstance(event, Registered):
            hashes.update(zip(event.blocks, event.hashes))
        if isinstance(event, Launched) and len(replay.decoding) > best:
            best = len(replay.decoding)
            state = {s: list(t) for s, t in replay.tables.items()}, replay.ref_counts.copy()
    assert state is not None
    tables, counts = state
    drawing = Drawing(270, "Three sequences share the blocks of their common prefix")
    shared = [
        block for block in next(iter(tables.values())) if block is not None and counts[block] > 1
    ]
    drawing.text(10, 22, "shared blocks: number, chained hash (its first digits), reference count")
    for i, common in enumerate(shared):
        x = 10 + i * 78
        drawing.rect(x, 34, 66, 64, colour(0), stroke=INK)
        drawing.text(x + 33, 52, f"block {common}", "middle", 12)
        drawing.text(x + 33, 70, f"{hashes[common][:6]}", "middle", 12)
        drawing.text(x + 33, 88, f"count {counts[common]}", "middle", 12)
        if i:
            drawing.line(x - 12, 66, x, 66)
    drawing.text(10, 132, "block tables: the same blocks first, then blocks of their own")
    for row, (seq, table) in enumerate(sorted(tables.items())):
        y = 146 + row * 38
        drawing.text(10, y + 19, f"sequence {seq}")
        for i, block in enumerate(table):
            assert block is not None
            fill = colour(0) if counts[block] > 1 else colour(row + 1)
            drawing.rect(110 + i * 60, y, 54, 28, fill, stroke=INK)
            drawing.text(137 + i * 60, y + 19, f"{block}", "middle")
    return drawing


def preempted() -> Drawing:
    """Draw when the sequences of chapter 7 run, wait and are computed again."""
    (events,) = runs.preemption().traces
    found = runs.cells(events)
    last = max(cell.step for cell in found) + 1
    scale = 640 / last
    drawing = Drawing(230, "Four sequences of which two are preempted, and the blocks in use")
    drawing.text(10, 20, f"{last} steps (orange: tokens are computed again; a gap: preempted)")
    seen: set[int] = set()
    for cell in found:
        again = cell.is_prefill and cell.seq in seen
        seen.add(cell.seq)
        width = max(scale, 5.0) if cell.is_prefill else scale
        fill = COLOURS[1] if again else COLOURS[4] if cell.is_prefill else COLOURS[0]
        drawing.rect(100 + cell.step * scale, 34 + cell.seq * 28, width, 20, fill)
    for seq in sorted(seen):
        drawing.text(10, 49 + seq * 28, f"sequence {seq}", size=12)
    drawing.text(10, 185, "blocks in use", size=12)
    for step in runs.launches(events):
        height = step.blocks_in_use * 3.5
        drawing.rect(100 + step.step * scale, 205 - height, scale, height, "#bbbbbb")
    drawing.line(100, 205 - 14 * 3.5, 740, 205 - 14 * 3.5, COLOURS[5])
    drawing.text(744, 205 - 14 * 3.5 + 4, "14", size=11)
    drawing.line(100, 205, 740, 205)
    num_preempted = sum(isinstance(event, Preempted) for event in events)
    drawing.text(100, 222, f"steps; {num_preempted} preemptions", size=12)
    return drawing


def gumbel() -> Drawing:
    """Draw logits and noise of the likeliest tokens, for three seeds: chapter 8."""
    events: list[Event] = []
    with runs.recorded(events) as llm:
        (prompt,) = llm.encode(["import os\nimport"])
        tokenizer = llm.get_tokenizer()
    model = Model()
    hidden = model.forward(
        torch.tensor(prompt),
        torch.arange(len(prompt)),
        lambda layer, q, k, v: causal_attention(q, k, v),
    )
    logits = model.logits(hidden[-1:])[0]
    best = logits.topk(7)
    drawing = Drawing(270, "Logit plus Gumbel noise of the seven likeliest tokens, for three seeds")
    drawing.text(10, 22, "score = logit (blue) + noise (orange; hollow: noise below 0)")
    for panel, seed in enumerate((1, 2, 3)):
        left = 10 + panel * 250
        uniform = uniform_noise(torch.tensor([seed]), torch.tensor([len(prompt)]), len(logits))[0]
        noise = -torch.log(-torch.log(uniform))[best.indices]
        base = best.values - best.values[-1] + 2
        winner = int((base + noise).argmax())
        drawing.text(left, 48, f"seed {seed}", size=13)
        for i, (logit, extra, index) in enumerate(zip(base, noise, best.indices)):
            y, unit = 58 + i * 28, 17
            word = repr(tokenizer.decode([int(index)]))[1:-1]
            drawing.text(left + 66, y + 15, word, "end", 12)
            drawing.rect(left + 72, y, float(logit) * unit, 20, COLOURS[0])
            x = left + 72 + float(logit) * unit
            if extra >= 0:
                drawing.rect(x, y, float(extra) * unit, 20, COLOURS[1])
            else:
                width = -float(extra) * unit
                drawing.rect(x - width, y + 5, width, 10, "#ffffff", stroke=COLOURS[1])
            if i == winner:
                drawing.text(x + max(0.0, float(extra) * unit) + 5, y + 15, "wins", size=12)
    return drawing


def split_matrices() -> Drawing:
    """Draw which rank holds which part of chapter 11's matrix."""
    drawing = Drawing(250, "A 4 x 4 matrix on two ranks: split by outputs, and split by inputs")
    weight, x = torch.tensor(runs.MATRIX), torch.tensor(runs.VECTOR)
    for left, label, by_inputs in ((10, "split by outputs", False), (390, "split by inputs", True)):
        drawing.text(left, 22, f"{label} (blue: rank 0, orange: rank 1)")
        for i in range(4):
            for j in range(4):
                fill = COLOURS[(j if by_inputs else i) // 2]
                drawing.rect(left + j * 34, 60 + i * 34, 32, 32, fill)
                drawing.text(left + j * 34 + 16, 81 + i * 34, f"{runs.MATRIX[i][j]}", "middle")
            fill = COLOURS[i // 2] if by_inputs else PALE
            drawing.rect(left + 156, 60 + i * 34, 32, 32, fill)
            drawing.text(left + 172, 81 + i * 34, f"{runs.VECTOR[i]}", "middle")
            drawing.text(left + 145, 81 + i * 34, "x" if i == 1 else "", "middle")
        drawing.text(left + 200, 115, "=")
        columns = (
            [part @ half for part, half in zip(weight.chunk(2, dim=1), x.chunk(2))]
            if by_inputs
            else [weight @ x]
        )
        for place, column in enumerate(columns):
            for i, value in enumerate(column.tolist()):
                fill = COLOURS[place if by_inputs else i // 2]
                drawing.rect(left + 218 + place * 56, 60 + i * 34, 32, 32, fill)
                drawing.text(left + 234 + place * 56, 81 + i * 34, f"{value}", "middle")
        if by_inputs:
            drawing.text(left + 262, 115, "+", "middle")
        below = "one sum over the ranks is needed" if by_inputs else "each rank keeps its part"
        drawing.text(left, 222, below)
    return drawing


PARTS = {"schedule": 0, "launch": 2, "commit": 1}  # of the host's time -> colour


def lanes() -> Drawing:
    """Draw what host and device of an H200 did, without and with overlap: chapter 9."""
    found, shown, scale = measured.figures()["overlap"], 6000.0, 0.108  # microseconds, pixels
    drawing = Drawing(330, "Host and device in steps of 64 sequences, without and with overlap")
    for top, word in ((30, "without"), (170, "with")):
        lane = found[word]
        # The profiler starts in the first step, and delays it.
        start = [span[2] for span in lane["host"] if span[0] == "schedule"][1]
        drawing.text(10, top - 8, f"{word} overlap")
        drawing.text(10, top + 24, "host", size=12)
        drawing.text(10, top + 66, "device", size=12)
        drawing.rect(80, top + 8, shown * scale, 24, PALE)
        drawing.rect(80, top + 50, shown * scale, 24, PALE)
        for part, _step, begin, end in lane["host"]:
            begin, end = begin - start, end - start
            if part in PARTS and begin >= 0 and end <= shown:
                width = max(1.5, (end - begin) * scale)
                fill = COLOURS[PARTS[part]]
                drawing.rect(80 + begin * scale, top + 8, width, 24, fill)
                if part == "launch":
                    drawing.line(80 + end * scale, top + 32, 80 + end * scale, top + 50)
        for begin, end in lane["device"]:
            begin, end = max(begin - start, 0.0), min(end - start, shown)
            if begin < end:
                drawing.rect(80 + begin * scale, top + 50, (end - begin) * scale, 24, COLOURS[4])
    y = 270
    for i, (part, number) in enumerate(PARTS.items()):
        drawing.rect(80 + i * 120, y, 14, 14, COLOURS[number])
        drawing.text(100 + i * 120, y + 12, part, size=12)
    drawing.rect(440, y, 14, 14, COLOURS[4])
    drawing.text(460, y + 12, "kernels", size=12)
    drawing.rect(560, y, 14, 14, PALE)
    drawing.text(580, y + 12, "waiting", size=12)
    for millisecond in range(7):
        x = 80 + millisecond * 1000 * scale
        drawing.text(x, 312, f"{millisecond} ms", "middle", 11)
    return drawing


def kernels() -> Drawing:
    """Draw the kernels at the beginning of a step, in three forms: chapter 10."""
    shown, scale = 300.0, 2.2  # microseconds, pixels
    drawing = Drawing(262, "The first kernels of a decode step, in three forms")
    for row, (form, label) in enumerate(runs.FORMS.items()):
        found, top = measured.figures()[form], 16 + row * 76
        drawing.text(10, top + 8, f"{label}: {found['kernels']:,.0f} kernels a step")
        drawing.rect(10, top + 16, shown * scale, 30, PALE)
        for i, (begin, elapsed, _) in enumerate(found["lane"]):
            if begin < shown:
                width, fill = min(elapsed, shown - begin) * scale, COLOURS[4 * (i % 2)]
                drawing.rect(10 + begin * scale, top + 16, width, 30, fill)
    for at in range(0, 301, 50):
        drawing.text(10 + at * scale, 244, f"{at}", "middle" if at else "start", 11)
    drawing.text(
        10, 258, "microseconds since the step's first kernel began; grey: nothing runs", size=11
    )
    return drawing


def rooflines() -> Drawing:
    """Draw measured decode steps and their roofline, on logarithmic axes: chapter 12."""
    drawing = Drawing(400, "Decode steps of an H200 and their roofline")

    def place(sequences: float, seconds: float) -> tuple[float, float]:
        return 90 + math.log2(sequences) * 76, 350 - math.log2(seconds / 1e-4) * 42

    for step in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20):
        _, y = place(1, step / 1000)
        drawing.line(90, y, 712, y, PALE)
        drawing.text(80, y + 4, f"{step:g} ms", "end", 11)
    for count in (1, 8, 64, 256):
        x, _ = place(count, 1e-4)
        drawing.line(x, 28, x, 350, PALE)
        drawing.text(x, 368, f"{count}", "middle", 11)
    drawing.text(400, 388, "sequences in a step", "middle", 12)
    for i, (model, name) in enumerate(runs.NAMES.items()):
        fill, steps = COLOURS[4 + i], measured.decode_times(model)
        counts = [2**power for power in range(9)]
        chunk = steps[0].chunks[0]
        bounds = [place(count, runs.bound_of(model, [chunk] * count)) for count in counts]
        for (x1, y1), (x2, y2) in zip(bounds, bounds[1:]):
            drawing.line(x1, y1, x2, y2, fill)
        for one in steps:
            x, y = place(one.sequences, one.seconds)
            drawing.circle(x, y, 5, fill)
        drawing.circle(110 + i * 330, 16, 5, fill)
        drawing.text(122 + i * 330, 20, f"{name} (line: the roofline)", size=12)
    return drawing


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "1-staircase.svg": staircase,
    "3-blocks.svg": blocks_of_sequences,
    "4-slots.svg": static_and_continuous,
    "5-budgets.svg": budgets,
    "6-shared.svg": shared_blocks,
    "7-preempted.svg": preempted,
    "8-gumbel.svg": gumbel,
    "9-lanes.svg": lanes,
    "10-kernels.svg": kernels,
    "11-matrices.svg": split_matrices,
    "12-roofline.svg": rooflines,
}


def main() -> None:
    """Write all drawings into the folder of the chapters."""
    for name, draw in DRAWINGS.items():
        (CHAPTERS / name).write_text(str(draw()), encoding="utf-8")


if __name__ == "__main__":
    main()
