"""Say what a trace in JSON tells in figures, and make a page of it.

python -m nanovllm.features.trace run.jsonl [run.html]
"""

import argparse

from nanovllm.features.trace.files import read_jsonl, write
from nanovllm.features.trace.summary import Summary


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m nanovllm.features.trace", description=__doc__)
    parser.add_argument("jsonl", help="what LLM(..., trace='run.jsonl') wrote")
    help = "where to write the page, a name that ends in .html"
    parser.add_argument("page", nargs="?", help=help)
    args = parser.parse_args()
    try:
        events = read_jsonl(args.jsonl)
        print(*Summary(events).lines(), sep="\n")
        if args.page:
            write(events, args.page)
    except LookupError as error:
        parser.error(f"{args.jsonl} names what it did not begin, such as a sequence: {error!r}")
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
