"""nanovllm, vLLM and transformers behind one interface."""

import argparse
import json
import platform
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.apps.bench.workloads import Work

SHOWN = sys.stderr.isatty()  # the engines' progress bars


class NanovllmEngine:
    def __init__(self, model: str, dummy: bool, args: argparse.Namespace) -> None:
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
        from transformers import AutoConfig, AutoModelForCausalLM

        cuda = torch.cuda.is_available()
        dtype, self.device = (torch.bfloat16, "cuda") if cuda else (torch.float32, "cpu")
        if dummy:
            config = AutoConfig.from_pretrained(model, trust_remote_code=False)
            loaded = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        else:
            loaded = AutoModelForCausalLM.from_pretrained(model, trust_remote_code=False)
        self.model = loaded.to(self.device, dtype).eval()
        self.vocab = self.model.config.vocab_size

    def run(self, work: Work, sampling: dict) -> list[list[int]]:
        outputs, random = [], sampling["temperature"] > 0
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


def device_name() -> str:
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
