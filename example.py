"""Complete a few prompts, and print the texts and the speed.

    python example.py                           the tiny code model in the package: no download
    python example.py --prompt "def is_prime(n):" --temperature 0 --max-tokens 100
    python example.py --model Qwen/Qwen3-0.6B --prompt "Why is the sky blue?"

The example completes all prompts together. Then it completes the first prompt again, alone, and
prints the text as it is generated. A model with a chat template, except the tiny model, gets each
prompt as a user's message. The example runs on a GPU if there is one, and on the CPU otherwise.
"""

import argparse
import sys
import time

from nanovllm import LLM, TINY_MODEL, SamplingParams

CODE = [
    "def read_lines(path):",
    "class Stack:\n    def push(self, item):",
    "import os\nimport sys\n\ndef main():",
    "def is_prime(n):",
]
QUESTIONS = [
    "Introduce yourself in two sentences.",
    "List the prime numbers below 50.",
    "Why is the sky blue?",
]
LINE = "-" * 80


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default=str(TINY_MODEL),
        metavar="MODEL",
        help="folder or hub id of the model (default: the tiny model in the package)",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="prompt to complete; repeat the flag for several (default: a few that suit the model)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.6,
        help="sampling temperature; 0 always picks the likeliest token (default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=64,
        help="longest output of a prompt, in tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        help="number of GPUs, or of ranks on a CPU, to split the model over (default: %(default)s)",
    )
    parser.add_argument(
        "--enforce-eager",
        action="store_true",
        help="run without CUDA graphs, which starts faster and runs slower",
    )
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    """Complete all prompts together, then the first one alone."""
    # Wrong values raise here, before the model is loaded. The seed gives the same text in each run.
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, seed=0)
    options = dict(tensor_parallel_size=args.tensor_parallel_size, enforce_eager=args.enforce_eager)
    with LLM(args.model, **options) as llm:  # logs what it loads, and where
        # The tiny model has a chat template, for examples of chat, but was trained on code only.
        is_chat = llm.has_chat_template and args.model != str(TINY_MODEL)
        prompts = args.prompt or (QUESTIONS if is_chat else CODE)
        if len(prompts) > 1:
            complete_together(llm, prompts, params, is_chat)
        complete_alone(llm, prompts[0], params, is_chat)


def complete_together(llm: LLM, prompts: list[str], params: SamplingParams, is_chat: bool) -> None:
    """Complete all prompts in one call, and print their texts and the speed."""
    begin = time.perf_counter()
    if is_chat:
        outputs = llm.chat([as_chat(prompt) for prompt in prompts], params, use_tqdm=False)
    else:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    for prompt, output in zip(prompts, outputs):
        show_prompt(prompt, is_chat)
        print(output["text"])
    count = sum(len(output["token_ids"]) for output in outputs)
    print(
        f"{LINE}\n{len(prompts)} prompts together: {count} tokens in {seconds:.2f} s, "
        f"{count / seconds:,.0f} tokens/s\n"
    )


def complete_alone(llm: LLM, prompt: str, params: SamplingParams, is_chat: bool) -> None:
    """Complete one prompt, and print its text as it is generated."""
    show_prompt(prompt, is_chat)
    stream = llm.stream_chat(as_chat(prompt), params) if is_chat else llm.stream(prompt, params)
    count, begin = 0, time.perf_counter()
    for _, text, token_ids, _ in stream:
        print(text, end="", flush=True)
        count += len(token_ids)
    seconds = time.perf_counter() - begin
    first = llm.metrics()["last_call"]["time_to_first_token"]["median"]
    print(
        f"\n{LINE}\n1 prompt alone: {count} tokens in {seconds:.2f} s, "
        f"{count / seconds:,.0f} tokens/s, time to first token {first:.3f} s"
    )


def as_chat(prompt: str) -> list[dict[str, str]]:
    """Make a conversation of one user's message."""
    return [{"role": "user", "content": prompt}]


def show_prompt(prompt: str, is_chat: bool) -> None:
    """Print a prompt: a question above its answer, code right before its continuation."""
    print(f"{LINE}\n{prompt}", end="\n\n" if is_chat else "")


if __name__ == "__main__":
    args = parse_args()
    try:
        main(args)
    except (ValueError, TypeError, OSError) as error:  # the user's mistakes: messages name a remedy
        print(f"example.py: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
