"""Measure throughput and latency, and compare with vLLM or transformers.

    python bench.py                                 the default workload for this machine
    python bench.py --model qwen3-8b --workload bench,latency
    python bench.py --compare vllm                  both engines in turn, in processes of their own
    python bench.py --compare transformers --workload laptop --model tiny
    python bench.py --model Qwen/Qwen3-0.6B --workload small    a real model on a laptop
    python bench.py --plot run.png                  a picture of the run, step by step
    python bench.py --policy fcfs,shortest-first    who waits how long under which scheduling policy
    python bench.py --trace run.html                its figures, and a page that replays every step
    python bench.py --workload conversations --requests 24    a part of a workload
    python bench.py --host                          what a step costs the host, without the device

Models: a folder, a hub id, "tiny" (the trained model in the package), or a shape with random
weights, so that nothing is downloaded: qwen3-0.6b, qwen3-1.7b, qwen3-8b, qwen3-32b, qwen3-30b-a3b.
Times are the first and the best of --repeat runs. The library's default options are measured, those
that every user gets, but for what --options says.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import accumulate
from math import log
from pathlib import Path
from random import Random
from statistics import median

# hidden, layers, heads, KV heads, head size, intermediate (of an expert), experts, experts of a
# token, tied head
SHAPES = {
    "qwen3-0.6b": (1024, 28, 16, 8, 128, 3072, 1, 1, True),
    "qwen3-1.7b": (2048, 28, 16, 8, 128, 6144, 1, 1, True),
    "qwen3-8b": (4096, 36, 32, 8, 128, 12288, 1, 1, False),
    "qwen3-32b": (5120, 64, 64, 8, 128, 25600, 1, 1, False),
    "qwen3-30b-a3b": (2048, 48, 32, 4, 128, 768, 128, 8, False),
}
VOCAB = 151936

WORKLOADS = {
    "bench": "256 requests, 100-1024 tokens in, 100-1024 out (133,966 in all)",
    "latency": "1 request, 128 in, 512 out",
    "prefill": "128 requests, 2048 in, 1 out",
    "shared": "256 requests, 2048 common tokens + 128 own in, 128 out",
    "long": "64 requests, 3000 in, 512 out",
    "many": "2048 requests, 16-128 in, 16-128 out",
    "conversations": "192 requests, 64-512 in, 128 out; then 4 times all of that and 64 more in",
    "lognormal": "768 requests, 16-2048 in (median 150), 16-1024 out (median 180), log-normal",
    "laptop": "64 requests, 16-256 in, 16-256 out, greedy",
    "small": "8 requests, 16-128 in, 32 out, greedy",
    "qwen-sampling": "256 requests of bench, with top_p 0.95 and top_k 20: Qwen3's own settings",
    "logprobs": "256 requests of bench, with logprobs 1",
    "penalties": "256 requests of bench, with presence_penalty 1",
}
GREEDY = ("laptop", "small")
# What the requests of a workload ask for beside a temperature, which is 0.6 unless it is greedy.
# Their prompts are those of bench.
ASKED = {
    "qwen-sampling": dict(top_p=0.95, top_k=20),
    "logprobs": dict(logprobs=1),
    "penalties": dict(presence_penalty=1.0),
}
ROUNDS = {"conversations": 5}  # calls one after the other; of others 1
NEW_TOKENS = 64  # of each further round
EXAMPLE = '{"max_num_batched_tokens": 2048}'  # of --options
SHOWN = sys.stderr.isatty()  # the engines' progress bars
Work = list[tuple[list[int], int]]  # prompt, output length


def workloads() -> Iterator[tuple[str, Work]]:
    """Every workload but the greedy ones, drawn in this order from one stream.

    They are what was measured elsewhere, to the token.
    """
    r = Random(0)

    def ids(n: int) -> list[int]:
        return [r.randint(0, 10000) for _ in range(n)]

    prompts = [ids(r.randint(100, 1024)) for _ in range(256)]
    yield "bench", [(prompt, r.randint(100, 1024)) for prompt in prompts]
    yield "latency", [(ids(128), 512)]
    yield "prefill", [(ids(2048), 1) for _ in range(128)]
    common = ids(2048)
    yield "shared", [(common + ids(128), 128) for _ in range(256)]
    yield "long", [(ids(3000), 512) for _ in range(64)]
    yield "many", [(ids(r.randint(16, 128)), r.randint(16, 128)) for _ in range(2048)]


def workload(name: str, vocab: int) -> Work:
    if name == "laptop":
        r = Random(0)
        work = [
            ([r.randrange(vocab) for _ in range(r.randint(16, 256))], r.randint(16, 256))
            for _ in range(64)
        ]
    elif name == "small":
        r = Random(0)
        work = [([r.randrange(vocab) for _ in range(r.randint(16, 128))], 32) for _ in range(8)]
    elif name == "conversations":
        r = Random(0)
        prompts = [[r.randrange(vocab) for _ in range(r.randint(64, 512))] for _ in range(192)]
        work = [(prompt, 128) for prompt in prompts]
    elif name == "lognormal":
        r = Random(0)

        def length(median: int, longest: int) -> int:
            return round(min(max(16, r.lognormvariate(log(median), 1)), longest))

        work = [
            ([r.randrange(vocab) for _ in range(length(150, 2048))], length(180, 1024))
            for _ in range(768)
        ]
    else:
        drawn_as = "bench" if name in ASKED else name
        work = next(work for key, work in workloads() if key == drawn_as)
    return [([token % vocab for token in prompt], length) for prompt, length in work]


def refresh(work: Work, name: str, repeat: int, vocab: int) -> Work:
    """Change the first token of each prompt.

    So a prefix cache helps inside a workload, but not between repeats, nor between workloads with
    the same prompts.
    """
    begin = 20000 + 300 * repeat
    if name in ASKED:
        begin += 30000 * (1 + list(ASKED).index(name))
    first = [begin + (0 if name == "shared" else i % 256) for i in range(len(work))]
    return [([token % vocab, *prompt[1:]], length) for token, (prompt, length) in zip(first, work)]


def next_round(work: Work, outputs: list[list[int]], seed: int, vocab: int) -> Work:
    """Each prompt, what was answered to it, and new tokens."""
    r = Random(seed)
    return [
        (prompt + output + [r.randrange(vocab) for _ in range(NEW_TOKENS)], length)
        for (prompt, length), output in zip(work, outputs)
    ]


def model_folder(name: str) -> tuple[str, bool]:
    """The folder or hub id to load, and whether its weights are made up."""
    if name == "tiny":
        from nanovllm import TINY_MODEL

        return str(TINY_MODEL), False
    if name not in SHAPES:
        return name, False
    hidden, layers, heads, kv_heads, head_dim, intermediate, experts, active, tied = SHAPES[name]
    config = dict(
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        vocab_size=VOCAB,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        tie_word_embeddings=tied,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        rope_theta=1000000,
        max_position_embeddings=40960,
        attention_bias=False,
        use_sliding_window=False,
        sliding_window=None,
        initializer_range=0.02,
        torch_dtype="bfloat16",
        bos_token_id=151643,
        eos_token_id=151645,
    )
    if experts > 1:
        config |= dict(
            architectures=["Qwen3MoeForCausalLM"],
            model_type="qwen3_moe",
            moe_intermediate_size=intermediate,
            num_experts=experts,
            num_experts_per_tok=active,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        )
    folder = Path(tempfile.gettempdir()) / f"nanovllm-bench-{os.getuid()}" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder), True


class NanovllmEngine:
    def __init__(self, model: str, dummy: bool, args: argparse.Namespace) -> None:
        from nanovllm import LLM

        options = json.loads(args.options)
        if args.trace:
            options["trace"] = str(args.trace)
        self.llm = LLM(
            model,
            load_format="dummy" if dummy else "auto",
            max_model_len=args.max_model_len,
            tensor_parallel_size=args.tensor_parallel_size,
            **options,
        )
        self.vocab = self.llm.engine.vocab_size

    def run(self, work: Work, sampling: dict) -> list[list[int]]:
        from nanovllm import SamplingParams

        params = [SamplingParams(**sampling, max_tokens=n, ignore_eos=True) for _, n in work]
        outputs = self.llm.generate([prompt for prompt, _ in work], params, use_tqdm=SHOWN)
        return [output["token_ids"] for output in outputs]


class VllmEngine:
    def __init__(self, model: str, dummy: bool, args: argparse.Namespace) -> None:
        from vllm import LLM

        self.llm = LLM(
            model,
            load_format="dummy" if dummy else "auto",
            skip_tokenizer_init=dummy,
            max_model_len=args.max_model_len,
            tensor_parallel_size=args.tensor_parallel_size,
            **json.loads(args.options),
        )
        self.vocab = self.llm.llm_engine.model_config.get_vocab_size()

    def run(self, work: Work, sampling: dict) -> list[list[int]]:
        from vllm import SamplingParams

        params = [
            SamplingParams(**sampling, max_tokens=n, ignore_eos=True, detokenize=False)
            for _, n in work
        ]
        outputs = self.llm.generate(
            [dict(prompt_token_ids=prompt) for prompt, _ in work], params, use_tqdm=SHOWN
        )
        return [list(output.outputs[0].token_ids) for output in outputs]


class TransformersEngine:
    """`generate` in left-padded static batches of 16, each as long as its longest output."""

    def __init__(self, model: str, dummy: bool, args: argparse.Namespace) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        self.torch, cuda = torch, torch.cuda.is_available()
        dtype, self.device = (torch.bfloat16, "cuda") if cuda else (torch.float32, "cpu")
        if dummy:
            config = AutoConfig.from_pretrained(model, trust_remote_code=False)
            loaded = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        else:
            loaded = AutoModelForCausalLM.from_pretrained(model, trust_remote_code=False)
        self.model = loaded.to(self.device, dtype).eval()
        self.vocab = self.model.config.vocab_size

    def run(self, work: Work, sampling: dict) -> list[list[int]]:
        torch, outputs, random = self.torch, [], sampling["temperature"] > 0
        for start in range(0, len(work), 16):
            batch = work[start : start + 16]
            width, length = max(len(prompt) for prompt, _ in batch), max(n for _, n in batch)
            ids = torch.zeros(len(batch), width, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for i, (prompt, _) in enumerate(batch):
                ids[i, width - len(prompt) :] = torch.tensor(prompt)
                mask[i, width - len(prompt) :] = 1
            with torch.inference_mode():
                rows = self.model.generate(
                    ids.to(self.device),
                    attention_mask=mask.to(self.device),
                    min_new_tokens=length,
                    max_new_tokens=length,
                    pad_token_id=0,
                    **(sampling | dict(do_sample=True) if random else dict(do_sample=False)),
                )
            # The rest of each row was made for nothing.
            outputs += [row[width : width + n] for row, (_, n) in zip(rows.tolist(), batch)]
        return outputs


ENGINES = {"nanovllm": NanovllmEngine, "vllm": VllmEngine, "transformers": TransformersEngine}


def roofline(model: str, work: Work, name: str, bandwidth: float, flops: float) -> float | None:
    """Seconds below which no engine comes, by all GPUs' rates together. Either bound may be the
    higher one:

    - bytes, then prompts: each step reads the weights once and each running sequence's K and V
      once, a common prefix's once for all; the prompts' tokens take two operations a parameter.
      Steps hold at most 512 sequences.
    - all operations: those, the same for tokens drawn, the head, and attention within prompts.

    Of experts, a step reads as many as its tokens would pick at random, and a token computes with
    its own alone. Several rounds have none.
    """
    if model not in SHAPES or name in ROUNDS:
        return None
    hidden, layers, heads, kv_heads, head_dim, intermediate, experts, active, _ = SHAPES[model]
    expert = layers * 3 * hidden * intermediate
    others = layers * (
        2 * hidden * (heads + kv_heads) * head_dim + (hidden * experts if experts > 1 else 0)
    )
    body = others + active * expert
    head = VOCAB * hidden
    kv_bytes = layers * kv_heads * head_dim * 2 * 2
    drawn = sum(n for _, n in work)
    weights_read, left, step = 0.0, 0, 0
    while left or step < max(
        n for _, n in work
    ):  # all run from the first step on; those over 512 wait for a later one
        left += sum(n > step for _, n in work)
        rows, step = min(left, 512), step + 1
        left -= rows
        weights_read += others + head + expert * experts * (1 - (1 - active / experts) ** rows)
    # Of every prompt but the first: in the prefix cache already, and read once for all that decode.
    spared = 2048 if name == "shared" else 0
    kv_read = sum(sum(range(len(prompt) + 1, len(prompt) + n)) for prompt, n in work)
    kv_read = (kv_read - spared * sum(n - 1 for _, n in work[1:])) * kv_bytes
    prompt_ops = 2 * body * (sum(len(prompt) for prompt, _ in work) - spared * (len(work) - 1))
    # Pairs of query and key.
    pairs = (sum(len(prompt) ** 2 for prompt, _ in work) - spared**2 * (len(work) - 1)) / 2
    all_ops = prompt_ops + 2 * (body + head) * drawn + 4 * layers * heads * head_dim * pairs
    return max((kv_read + weights_read * 2) / bandwidth + prompt_ops / flops, all_ops / flops)


def ceilings() -> tuple[float, float] | None:
    """This GPU's copy bandwidth in bytes/s and bf16 matrix rate in FLOP/s, measured now."""
    import torch

    if not torch.cuda.is_available():
        return None

    def seconds(f, n: int = 10) -> float:
        for _ in range(3):
            f()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(n):
            f()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / n / 1e3

    x = torch.randn(2**29, device="cuda")
    y = torch.empty_like(x)
    copy = 2 * x.nbytes / seconds(lambda: y.copy_(x))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * 8192**3 / seconds(lambda: a @ b)
    x = y = a = b = None
    torch.cuda.empty_cache()
    return copy, rate


def measure(args: argparse.Namespace) -> list[dict]:
    """Run the workloads on one engine in this process."""
    folder, dummy = model_folder(args.model)
    limits = ceilings() if args.model in SHAPES else None
    begin = time.perf_counter()
    engine = ENGINES[args.engine](folder, dummy, args)
    engine.run([([1, 2, 3], 16)], dict(temperature=0.0))
    common = dict(
        engine=args.engine,
        model=args.model,
        startup_seconds=time.perf_counter() - begin,
        device=device_name(),
        options=json.loads(args.options),
        versions=versions(args.engine),
    )
    print_start(common, args)
    rows: list[dict] = []
    steps: list = []
    if args.plot:
        engine.llm.on_step(steps.append)
    for name in args.workload.split(","):
        work = workload(name, engine.vocab)[: args.requests]
        seconds = []
        for repeat in range(args.repeat):
            steps.clear()  # a picture is of the last run, and so is a trace
            if args.trace:
                engine.llm.engine.listeners[-1].restart(bandwidth=limits[0] if limits else None)
            seconds.append(run_once(engine, work, name, repeat, args))
        tokens, best = num_output_tokens(work, name), min(seconds)
        rates = [rate * args.tensor_parallel_size for rate in limits or ()]
        limit = roofline(args.model, work, name, *rates) if rates else None
        row = common | dict(
            workload=name,
            requests=len(work),
            seconds=best,
            first_seconds=seconds[0],
            runs=seconds,
            output_tokens=tokens,
            output_tokens_per_second=tokens / best,
            roofline_seconds=limit,
            roofline_fraction=limit / best if limit else None,
        )
        rows.append(row)
        print_row(row)
        if args.plot:
            plot_run(steps, name, common["device"], args)
    if args.trace:
        rows[-1]["trace"] = end_trace(engine.llm, args.trace)
    return rows


def end_trace(llm, path: Path) -> dict:
    """Write a trace, and print what its run was like; returns the figures."""
    from nanovllm.features.trace.summary import Summary

    summary = Summary(llm.engine.listeners[-1].events)
    llm.close()
    print(f"              the last run, replayed in {path}:")
    for line in summary.lines():
        print(f"              {line}", flush=True)
    return summary.figures()


def run_once(engine, work: Work, name: str, repeat: int, args: argparse.Namespace) -> float:
    """Run a workload, with prompts of its own in each repeat; returns the seconds it took."""
    count = 2 if args.policy else args.repeat
    print(f"{name}: run {repeat + 1} of {count}", file=sys.stderr, flush=True)
    fresh = refresh(work, name, repeat, engine.vocab)
    sampling = dict(temperature=0.0 if name in GREEDY else 0.6) | ASKED.get(name, {})
    outputs: list[list[int]] = []
    tokens, seconds = 0, 0.0
    for round in range(ROUNDS.get(name, 1)):
        if outputs:
            fresh = next_round(fresh, outputs, round, engine.vocab)
        begin = time.perf_counter()
        outputs = engine.run(fresh, sampling)
        seconds += time.perf_counter() - begin
        tokens += sum(map(len, outputs))
    wanted = num_output_tokens(work, name)
    if tokens != wanted:
        raise RuntimeError(f"{name}: {args.engine} made {tokens} tokens instead of {wanted}")
    return seconds


def num_output_tokens(work: Work, name: str) -> int:
    return sum(n for _, n in work) * ROUNDS.get(name, 1)


def find_policy(name: str):
    """A new policy: by a name of the library's, or as "module:Class"."""
    from nanovllm.features.policies import POLICIES, choose_policy

    if name in POLICIES:
        return POLICIES[name]()
    module, _, attribute = name.partition(":")
    try:
        return choose_policy(getattr(import_module(module), attribute)())
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(
            f"--policy {name}: the policies are {', '.join(POLICIES)}, or give your own as "
            f"module:Class, such as my_file:MyPolicy of a my_file.py that Python finds ({error})"
        ) from error


def compare_policies(args: argparse.Namespace) -> list[dict]:
    """Serve one load under each policy, by turns, on one engine.

    Half of the workload's requests, every other one, is there at the start, as in a call of
    `generate`: the batch. The others come at random times while it runs, as by `add_request`: they
    are people who wait, and have the better priority. They come within the first half of the time
    that the whole takes at once, so that there is always more to do than can be done.
    """
    folder, dummy = model_folder(args.model)
    engine = NanovllmEngine(folder, dummy, args)
    rows = []
    for name in args.workload.split(","):
        work = workload(name, engine.vocab)[: args.requests]
        if len(work) < 2:
            raise ValueError(f"--policy: workload {name} has one request, which waits for no other")
        # The first run compiles and captures.
        span = [run_once(engine, work, name, repeat, args) for repeat in (0, 1)][-1] / 2
        r = Random(0)
        arrivals = [r.uniform(0, span) if i % 2 else 0.0 for i in range(len(work))]
        runs: dict[str, list[dict]] = {policy: [] for policy in args.policy.split(",")}
        for repeat in range(args.repeat):
            fresh = refresh(work, name, 2 + repeat, engine.vocab)
            for policy, results in runs.items():
                print(f"{name}: {policy}, {repeat + 1} of {args.repeat}", file=sys.stderr)
                results.append(serve(engine.llm, policy, fresh, arrivals, name))
        print_policies(args, name, span, runs)
        rows += [
            dict(model=args.model, workload=name, policy=policy, device=device_name(), runs=results)
            | dict(options=json.loads(args.options), versions=versions("nanovllm"))
            for policy, results in runs.items()
        ]
    return rows


def serve(llm, policy: str, work: Work, arrivals: list[float], name: str) -> dict[str, float]:
    """Let requests come at their times, in seconds. A time to first token begins there, even if
    the engine was in a step then.
    """
    from nanovllm import SamplingParams
    from nanovllm.engine.metrics import percentiles

    # An engine has one policy for all of its life: begin a new one, with an empty prefix cache.
    llm.engine.policy = find_policy(policy)
    llm.engine.reset()
    coming = deque(sorted(range(len(work)), key=lambda i: arrivals[i]))
    added, begin = {}, time.perf_counter()
    while coming or llm.engine.has_unfinished():
        while coming and arrivals[coming[0]] <= time.perf_counter() - begin:
            i = coming.popleft()
            prompt, length = work[i]
            params = SamplingParams(
                temperature=0.0 if name in GREEDY else 0.6,
                max_tokens=length,
                ignore_eos=True,
                priority=0 if arrivals[i] else 1,
            )
            added[i] = llm.engine.add(prompt, params, interactive=arrivals[i] > 0)
        llm.step()
    seconds = time.perf_counter() - begin
    wait = {i: seq.first_token_at - begin - arrivals[i] for i, seq in added.items()}
    later = [wait[i] for i in added if arrivals[i]]
    return dict(
        mean=sum(wait.values()) / len(wait),
        p99=percentiles(wait.values())["p99"],
        mean_of_later=sum(later) / len(later),
        p99_of_later=percentiles(later)["p99"],
        seconds=seconds,
    )


def print_policies(
    args: argparse.Namespace, name: str, span: float, runs: dict[str, list[dict]]
) -> None:
    """A table in Markdown: of each figure, the median of the runs."""
    print(
        f"\n{args.model}, {name} on {device_name()}, {options_name(args.options)}: half of the "
        f"requests at the start, half within {span:.2f} s.\n"
        f"Seconds, median of {args.repeat} runs by turns.\n\n"
        "| policy | to first token, mean | p99 | of those that come later, mean | p99 "
        "| to the end |\n| --- | --- | --- | --- | --- | --- |"
    )
    for policy, results in runs.items():
        middle = [median(result[figure] for result in results) for figure in results[0]]
        print(f"| {policy} | {' | '.join(f'{seconds:.3f}' for seconds in middle)} |", flush=True)


def options_name(options: str) -> str:
    return "the library's default options" if options == "{}" else f"options {options}"


def plot_run(steps: list, name: str, device: str, args: argparse.Namespace) -> None:
    """Draw a workload's run, in a file of its own if there are several workloads."""
    stem = args.plot.stem if args.workload == name else f"{args.plot.stem}-{name}"
    path = args.plot.with_stem(stem)
    setting = f"{device}, {options_name(args.options)}"
    plot(steps, path, f"{args.model}, {name}: {WORKLOADS[name]}\n{setting}")
    print(f"              drawn in {path}")


def plot(steps: list, path: Path, title: str) -> None:
    """Draw a run over time: sequences, tokens of steps and of seconds, KV blocks."""
    from matplotlib.figure import Figure

    times = [step.time - steps[0].time for step in steps]
    figure = Figure(figsize=(11, 10), layout="constrained")
    sequences, tokens, rates, blocks = figure.subplots(4, 1, sharex=True)
    figure.suptitle(title)
    sequences.plot(times, [step.running for step in steps], label="running")
    sequences.plot(times, [step.waiting for step in steps], label="waiting")
    preempted = list(accumulate(step.preemptions for step in steps))
    sequences.plot(times, preempted, ":", label="preempted so far")
    sequences.set_ylabel("sequences")
    tokens.set_ylabel("tokens of a step")
    rates.set_ylabel("tokens a second")
    for kind in ("prefill", "decode"):
        counts = [getattr(step, f"{kind}_tokens") for step in steps]
        dots = [(at, count) for at, count in zip(times, counts) if count]
        if dots:
            tokens.plot(*zip(*dots), ".", label=kind)
            rates.stairs(*tokens_a_second(times, counts), label=kind)
    # From one token to a whole budget of prompts: only a logarithm shows both.
    tokens.set_yscale("log")
    blocks.plot(times, [step.blocks_in_use for step in steps], label="in use")
    num_blocks = steps[0].num_blocks
    blocks.axhline(num_blocks, color="gray", linestyle="--", label=f"capacity: {num_blocks:,}")
    blocks.set_ylabel("KV blocks")
    blocks.set_xlabel("seconds")
    for axes in (sequences, tokens, rates, blocks):
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def tokens_a_second(
    times: list[float], counts: list[int], num_spans: int = 60
) -> tuple[list[float], list[float]]:
    """Rates within equal spans of a run, and the edges of the spans."""
    span = max(times[-1], 1e-6) / num_spans
    totals = [0] * num_spans
    for at, count in zip(times, counts):
        totals[min(int(at / span), num_spans - 1)] += count
    return [total / span for total in totals], [i * span for i in range(num_spans + 1)]


def device_name() -> str:
    import torch

    return (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"CPU, {torch.get_num_threads()} threads"
    )


def versions(engine: str) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in {"torch", "triton", "flash-attn", "flash-attn-4", "transformers", engine}:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def print_start(common: dict, args: argparse.Namespace) -> None:
    start = f"ready after {common['startup_seconds']:.1f} s"
    about = ", ".join((common["device"], options_name(args.options), start))
    print(f"{common['engine']:>12}  on {about}", flush=True)


def print_row(row: dict) -> None:
    fraction = (
        f", {row['roofline_fraction']:.0%} of the roofline" if row["roofline_fraction"] else ""
    )
    print(
        f"{row['engine']:>12}  {row['model']}  {row['workload']:<13} first "
        f"{row['first_seconds']:8.3f} s, best of {len(row['runs'])} {row['seconds']:8.3f} s  "
        f"{row['output_tokens_per_second']:>10,.0f} tok/s out{fraction}",
        flush=True,
    )


def compare(args: argparse.Namespace) -> list[dict]:
    """Run nanovllm and the other engine in processes of their own, and print one table.

    Each prints its rows as they come.
    """
    results: dict[str, dict[str, dict]] = {}
    for engine in ("nanovllm", args.compare):
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            options = {"engine": engine, "json": file.name}
            for name in ("model", "workload", "repeat", "max_model_len", "tensor_parallel_size"):
                options[name] = getattr(args, name)
            if args.requests:
                options["requests"] = args.requests
            if engine == "nanovllm":
                options["options"] = args.options
            command = [sys.executable, "-u", __file__]
            for name, value in options.items():
                command += [f"--{name.replace('_', '-')}", str(value)]
            if subprocess.run(command).returncode:
                sys.exit(f"bench.py: {engine} failed (its error is above)")
            rows = json.loads(Path(file.name).read_text())
            results[engine] = {row["workload"]: row for row in rows}
    print_table(args, *results.values())
    return [row for rows in results.values() for row in rows.values()]


def print_table(args: argparse.Namespace, ours: dict[str, dict], theirs: dict[str, dict]) -> None:
    """Two engines' rows, by workload, as a table in Markdown."""
    one = next(iter(ours.values()))
    setting = f"{args.model} on {one['device']}; seconds, the first run and the best"
    print(f"\n{setting} of {args.repeat}; nanovllm: {options_name(args.options)}\n")
    titles = ("workload", "nanovllm", args.compare, f"{args.compare} / nanovllm")
    print(f"| {' | '.join(titles)} | nanovllm of roofline |")
    print("| --- | --- | --- | --- | --- |")
    for name, row in ours.items():
        fraction = f"{row['roofline_fraction']:.0%}" if row["roofline_fraction"] else "-"
        pairs = [(each["first_seconds"], each["seconds"]) for each in (row, theirs[name])]
        times = [f"{first:.3f}, {best:.3f}" for first, best in pairs]
        ratio = ", ".join(f"{other / own:.2f}" for own, other in zip(*pairs))
        print(f"| {name} | {' | '.join(times)} | {ratio} | {fraction} |")
    start, their_start = (next(iter(rows.values()))["startup_seconds"] for rows in (ours, theirs))
    print(f"| start to first token | {start:.1f} | {their_start:.1f} | | |")


def host_cost(counts: tuple[int, ...] = (256, 512, 1024, 2048), steps: int = 400) -> None:
    """Schedule and commit with a runner that computes nothing: milliseconds of a step."""
    from nanovllm import SamplingParams
    from nanovllm.engine.block_manager import BlockManager
    from nanovllm.engine.scheduler import Scheduler
    from nanovllm.engine.sequence import Sequence
    from nanovllm.features.policies.throughput import ThroughputPolicy

    for count in counts:
        blocks = BlockManager(count * 8, 256)
        budget = max(16384, count)
        scheduler = Scheduler(
            blocks, ThroughputPolicy(), max_num_seqs=count, max_num_batched_tokens=budget
        )
        r = Random(0)
        for i in range(count):
            prompt = [r.randrange(VOCAB) for _ in range(r.randint(100, 300))]
            scheduler.add(
                Sequence(i, prompt, SamplingParams(max_tokens=1024), max_len=len(prompt) + 1024)
            )
        while len(scheduler.running) < count:
            batch = scheduler.schedule()
            scheduler.commit([1] * (len(batch.decode_slots) + len(batch.first_samples)))
        tokens, seconds = [1] * count, []
        for _ in range(steps):
            begin = time.perf_counter()
            scheduler.schedule()
            scheduler.commit(tokens)
            seconds.append(time.perf_counter() - begin)
        seconds.sort()
        print(
            f"{count:5} running sequences: {seconds[steps // 2] * 1e3:.3f} ms a step "
            f"(median of {steps}; "
            f"mean {sum(seconds) / steps * 1e3:.3f}, worst {seconds[-1] * 1e3:.3f})"
        )


def make_parser() -> argparse.ArgumentParser:
    names = "\n".join(f"  {name:<13} {text}" for name, text in WORKLOADS.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"workloads:\n{names}",
    )
    add = parser.add_argument
    others = [name for name in ENGINES if name != "nanovllm"]
    add("--engine", choices=ENGINES, default="nanovllm", help="measure this one")
    add("--compare", choices=others, help="run this engine too")
    add("--model", help="default: qwen3-0.6b on a GPU, tiny without one")
    help = "one or several, separated by commas; default: bench on a GPU, laptop without one"
    add("--workload", help=help)
    add("--requests", metavar="N", type=int, help="run the first N requests of each workload alone")
    add("--repeat", metavar="N", type=int, default=2, help="runs of each workload; default: 2")
    help = "the longest prompt and output together; default: 4096"
    add("--max-model-len", metavar="N", type=int, default=4096, help=help)
    help = "GPUs, or ranks on a CPU, to split the model over; default: 1"
    add("--tensor-parallel-size", metavar="N", type=int, default=1, help=help)
    help = f"options of the engine's LLM instead of its defaults, as JSON such as {EXAMPLE}"
    add("--options", default="{}", help=help)
    add("--json", metavar="FILE", help="write the measurements there")
    help = "draw each workload's last run there; needs matplotlib"
    add("--plot", metavar="PNG", type=Path, help=help)
    help = "compare scheduling policies, by name or as module:Class, separated by commas"
    add("--policy", metavar="NAMES", help=help)
    help = "print and write what the last run did: a page (.html) or its events (.jsonl)"
    add("--trace", metavar="HTML", type=Path, help=help)
    add("--host", action="store_true", help="measure the host's cost of a step and nothing else")
    return parser


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for what is wrong."""
    names = set(args.workload.split(","))
    if unknown := sorted(names - WORKLOADS.keys()):
        raise ValueError(f"--workload {unknown[0]}: the workloads are {', '.join(WORKLOADS)}")
    if "transformers" in (args.engine, args.compare) and {"logprobs", "penalties"} & names:
        raise ValueError("--workload: transformers has no logprobs and no presence_penalty")
    for option in ("repeat", "requests"):
        if (count := getattr(args, option)) is not None and count < 1:
            raise ValueError(f"--{option} is {count}: use 1 or more")
    try:
        options = json.loads(args.options)
    except ValueError as error:
        raise ValueError(
            f"--options {args.options}: use JSON such as {EXAMPLE} ({error})"
        ) from error
    if not isinstance(options, dict) or {"max_model_len", "tensor_parallel_size"} & set(options):
        raise ValueError(
            f"--options {args.options}: use an object of LLM's options, but for those that have "
            "their own here"
        )
    if args.policy:
        if args.compare or args.engine != "nanovllm" or args.plot or args.trace:
            raise ValueError(
                "--policy compares nanovllm with itself: leave --compare, --engine, --plot and "
                "--trace out"
            )
        for name in args.policy.split(","):
            find_policy(name)
    for path in (args.json, args.plot, args.trace):
        if path and not Path(path).absolute().parent.is_dir():
            raise ValueError(f"{path} is in no folder that exists")
        if path and Path(path).is_dir():
            raise ValueError(f"{path} is a folder: name a file in it")
    if args.trace and "," in args.workload:
        raise ValueError(f"--trace is of one workload, and --workload is {args.workload}: name one")
    if args.plot or args.trace:
        if args.compare or args.engine != "nanovllm":
            raise ValueError(
                "--plot and --trace show nanovllm's own steps: leave --compare and --engine out"
            )
    if args.plot:
        if not find_spec("matplotlib"):
            raise ValueError("--plot needs matplotlib: pip install matplotlib, or nanovllm[plot]")
    for engine in filter(None, (args.engine, args.compare)):
        if not find_spec(engine):
            raise ValueError(f"{engine} is not installed: install it first, or leave it out")


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    if args.host:
        return host_cost()
    if args.model is None or args.workload is None:
        import torch

        on_gpu = torch.cuda.is_available()
        args.model = args.model or ("qwen3-0.6b" if on_gpu else "tiny")
        args.workload = args.workload or ("bench" if on_gpu else "laptop")
    try:
        check(args)
        how = compare if args.compare else compare_policies if args.policy else measure
        rows = how(args)
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=1))
    except (ValueError, TypeError, OSError) as error:  # such as a full disk's
        parser.error(str(error))


if __name__ == "__main__":
    main()
