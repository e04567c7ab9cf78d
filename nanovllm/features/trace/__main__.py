"""A command that prints a trace's figures and makes a page of it.

python -m nanovllm.features.trace run.jsonl [run.html]
"""

import argparse

from nanovllm.features.trace.files import read_jsonl, write
from nanovllm.features.trace.summary import Summary


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m nanovllm.features.trace", description=__doc__)
    parser.add_argument("jsonl", help="a file that LLM(..., trace='run.jsonl') wrote")
    help = "the file to which to write the page; its name ends in .html"
    parser.add_argument("page", nargs="?", help=help)
    args = parser.parse_args()
    try:
        events = read_jsonl(args.jsonl)
        print(*Summary(events).lines(), sep="\n")
        if args.page:
            write(events, args.page)
    except LookupError as error:
        parser.error(
            f"{args.jsonl} names a sequence, a block or a step that it did not introduce "
            f"({error!r}): give a file that LLM(..., trace='run.jsonl') wrote"
        )
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
