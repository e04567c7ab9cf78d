"""Make a page of a trace in JSON: `python -m nanovllm.trace run.jsonl run.html`."""

import argparse

from nanovllm.trace.files import read_jsonl, write


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m nanovllm.trace", description=__doc__)
    parser.add_argument("jsonl", help="what LLM(..., trace='run.jsonl') wrote")
    parser.add_argument("page", help="where to write the page, a name that ends in .html")
    args = parser.parse_args()
    try:
        write(read_jsonl(args.jsonl), args.page)
    except OSError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
