"""The command line: `python -m nanovllm`."""

import argparse
import sys

from nanovllm.apps.course import command as course
from nanovllm.apps.jobs import command as jobs
from nanovllm.apps.jobs.options import Parser


def main(argv: list[str] | None = None) -> int:
    """Run the command that `argv` names, and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m nanovllm", description="Offline LLM inference."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    jobs.add_command(commands)
    course.add_command(commands)
    args = parser.parse_args(argv)
    if not hasattr(args, "function"):
        parser.print_help()
        return 0
    return args.function(args)


if __name__ == "__main__":
    sys.exit(main())
