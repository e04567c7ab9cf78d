"""The folder that a reader of the course works in: a skeleton of the engine, and its tests.

The skeleton is made from the solution, so there is one source of both. Comments in the solution
mark its pieces:

    # <piece 5: a hint>
    what the reader writes
    # <until then>
    # what stands in the skeleton instead
    # </piece>

Without `until then`, the skeleton raises NotImplementedError there.
"""

import re
import shutil
from pathlib import Path

HERE = Path(__file__).parent
SOLUTION, TESTS = HERE / "solution", HERE / "tests"
CHAPTERS = HERE.parents[1] / "docs" / "course"
PACKAGE = "my_engine"  # the reader's name for the solution's package
PIECES = {
    1: ("One token by hand", "one_token.py"),
    2: ("The KV cache", "kv_cache.py"),
    3: ("Paged attention", "block_manager.py and paged_cache.py"),
    4: ("Continuous batching", "scheduler.py"),
    5: ("Chunked prefill", "scheduler.py"),
    6: ("The prefix cache", "block_manager.py"),
    7: ("Preemption", "scheduler.py"),
    8: ("Sampling without state", "sampler.py"),
    9: ("Overlap", "overlapped.py"),
    10: ("CUDA graphs and small kernels", "graph.py"),
    11: ("Tensor parallelism", "parallel_model.py"),
    12: ("The roofline: how fast could it be?", "roofline.py"),
}
MARK = re.compile(r"( *)# <(piece (\d+)(: .*)?|until then|/piece)>")


def cut(source: str, solved: set[int]) -> str:
    """Cut the pieces that are not in `solved` out of a file of the solution."""
    lines: list[str] = []
    piece, is_solved, in_stand_in, has_stand_in = "", True, False, False
    for line in source.splitlines():
        mark = MARK.fullmatch(line)
        if mark is None:
            if in_stand_in:
                if not is_solved:
                    lines.append(line.replace("# ", "", 1))
            elif is_solved:
                lines.append(line)
            continue
        indent, name = mark[1], mark[2]
        if name.startswith("piece"):
            piece, is_solved, has_stand_in = f"piece {mark[3]}", int(mark[3]) in solved, False
            if not is_solved:
                lines.append(f"{indent}# TODO {name}")
        elif name == "until then":
            in_stand_in = has_stand_in = True
        else:
            if not is_solved and not has_stand_in:
                lines.append(f'{indent}raise NotImplementedError("{piece} is missing here")')
            is_solved, in_stand_in = True, False
    return "\n".join(lines) + "\n"


def renamed(source: str) -> str:
    """Give the solution's package the name that it has in the reader's folder."""
    return source.replace("nanovllm.apps.course.solution", PACKAGE)


def check_new(folder: Path) -> None:
    """Raise ValueError if a folder is not new and not empty."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"FOLDER is {str(folder)!r}, which is a file: name a new folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(
            f"FOLDER is {str(folder)!r}, which is not empty: name a new folder, so that nothing of "
            "yours is overwritten"
        )


def write_skeleton(folder: Path, solved: set[int] = frozenset()) -> None:  # type: ignore[assignment]
    """Write the skeleton, its tests and a README into an empty or new folder.

    `solved`: the pieces that are not cut out.
    """
    check_new(folder)
    (folder / PACKAGE).mkdir(parents=True)
    (folder / "tests").mkdir()
    for path in sorted(SOLUTION.glob("*.py")):
        (folder / PACKAGE / path.name).write_text(cut(renamed(path.read_text("utf-8")), solved))
    for path in sorted(TESTS.glob("*.py")):
        (folder / "tests" / path.name).write_text(renamed(path.read_text("utf-8")))
    shutil.copy(HERE / "folder.md", folder / "README.md")
