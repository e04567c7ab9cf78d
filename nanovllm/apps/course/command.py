"""The command line of the course: `python -m nanovllm course FOLDER`."""

import argparse
import sys
from pathlib import Path

from nanovllm.apps.course.skeleton import CHAPTERS, write_skeleton

REFUSED = 2  # exit code
DESCRIPTION = """\
Write the skeleton of an inference engine into FOLDER, with a test for each missing piece. The
chapters of the course explain the pieces, one after the other. With --html, write the chapters
instead, as pages for a browser, with the traces of their runs.
"""


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add the command `course`."""
    parser = commands.add_parser(
        "course",
        help="write the skeleton of an engine, which you complete with the course",
        description=DESCRIPTION,
    )
    parser.set_defaults(function=run)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a new or empty folder")
    parser.add_argument(
        "--html", action="store_true", help="write the chapters as pages, with their traces"
    )


def run(args: argparse.Namespace) -> int:
    """Write the folder, say what to read first, and return the exit code."""
    try:
        if args.html:
            return write_html(args.folder)
        write_skeleton(args.folder)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    print(f"The skeleton is in {args.folder}: read {args.folder / 'README.md'} first.")
    print(f"The chapters of the course begin with {CHAPTERS / 'README.md'}.")
    return 0


def write_html(folder: Path) -> int:
    """Write the chapters as pages. Returns the exit code."""
    try:
        from nanovllm.apps.course.pages import write_pages
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--html needs the package {error.name}: pip install 'nanovllm[course]'"
        ) from error
    write_pages(folder)
    print(f"The course is in {folder}: open {folder / 'index.html'} in a browser.")
    return 0
