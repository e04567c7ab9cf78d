"""The measured engines: nanovllm, vLLM, transformers and OpenVINO behind one interface."""

import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.apps.bench.shapes import model_folder
from nanovllm.apps.bench.workloads import Work
from nanovllm.frontend.log import uncounted_import_seconds
from nanovllm.weights.model_files import read_config_json

SHOW_PROGRESS = sys.stderr.isatty()  # whether the engines show their progress bars


class Engine(Protocol):
    """The interface of an engine that has loaded a model.

    The arguments of a class that implements it are the model's folder or hub id, whether to use
    random weights, and by keyword `max_model_len`, `tensor_parallel_size` and engine options.
    """

    vocab: int  # number of token ids that a prompt may use
    # The most tokens of prompt and output of a request; None: the engine itself refuses more.
    max_model_len: int | None

    def run(self, work: Work, sampling: dict) -> list[list[int]]:
        """Run all requests in one call. Returns the output tokens of each request."""
        ...


class NanovllmEngine:
    """nanovllm."""

    def __init__(self, model: str, random_weights: bool, **options: Any) -> None:
        load_format = "dummy" if random_weights else "auto"
        self.llm = LLM(model, load_format=load_format, **options)
        assert self.llm.engine is not None
        self.vocab = self.llm.engine.vocab_size
        self.max_model_len: int | None = self.llm.max_model_len

    def run(self, work: Work, sampling: dict) -> list[list[int]]:
        params = [SamplingParams(**sampling, max_tokens=n, ignore_eos=True) for _, n in work]
        outputs = self.llm.generate([prompt for prompt, _ in work], params, use_tqdm=SHOW_PROGRESS)
        return [output["token_ids"] for output in outputs]


class VllmEngine:
    """vLLM."""

    max_model_len: int | None = None

    def __init__(self, model: str, random_weights: bool, **options: Any) -> None:
        import vllm

        if random_weights and "vision_config" in read_config_json(model):
            options["language_model_only"] = True
        self.llm = vllm.LLM(
            model,
            load_format="dummy" if random_weights else "auto",
            skip_tokenizer_init=random_weights,
            **options,
        )
        self.vocab = self.llm.llm_engine.model_config.get_vocab_size()

    def run(self, work: Work, sampling: dict) -> list[list[int]]:
        import vllm

        params = [
            vllm.SamplingParams(**sampling, max_tokens=n, ignore_eos=True, detokenize=False)
            for _, n in work
        ]
        prompts = [dict(prompt_token_ids=prompt) for prompt, _ in work]
        outputs = self.llm.generate(prompts, params, use_tqdm=SHOW_PROGRESS)
        return [list(output.outputs[0].token_ids) for output in outputs]


class TransformersEngine:
    """transformers: `generate` in left-padded static batches of 16 requests.

    A batch runs until its longest output is complete. Options by keyword are ignored.
    """

    max_model_len: int | None = None

    def __init__(self, model: str, random_weights: bool, **options: Any) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        on_gpu = torch.cuda.is_available()
        dtype, self.device = (torch.bfloat16, "cuda") if on_gpu else (torch.float32, "cpu")
        if random_weights:
            config = AutoConfig.from_pretrained(model, trust_remote_code=False)
            loaded = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        else:
            loaded = AutoModelForCausalLM.from_pretrained(model, trust_remote_code=False)
        self.model = loaded.to(self.device, dtype).eval()
        self.vocab = self.model.config.vocab_size

    def run(self, work: Work, sampling: dict) -> list[list[int]]:
        outputs: list[list[int]] = []
        random = sampling["temperature"] > 0
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
            # A row is as long as the longest output of the batch: cut it to its own length.
            outputs += [row[width : width + n] for row, (_, n) in zip(rows.tolist(), batch)]
        return outputs


class OpenVINOEngine:
    """OpenVINO GenAI on the CPU: continuous batches, in the dtypes that it chooses itself.

    Options by keyword are ignored.
    """

    max_model_len: int | None = None

    def __init__(self, model: str, random_weights: bool, **options: Any) -> None:
        import openvino_genai

        with tempfile.TemporaryDirectory() as folder:
            begin = time.perf_counter()
            convert_for_openvino(model, folder)
            self.conversion_seconds = time.perf_counter() - begin
            self.pipeline = openvino_genai.ContinuousBatchingPipeline(
                folder, openvino_genai.SchedulerConfig(), "CPU"
            )
            config = json.loads(Path(folder, "config.json").read_text())
        self.vocab = config["vocab_size"]

    def run(self, work: Work, sampling: dict) -> list[list[int]]:
        import openvino
        import openvino_genai

        how = sampling | dict(do_sample=True) if sampling["temperature"] > 0 else {}
        prompts = [openvino.Tensor(np.array([prompt])) for prompt, _ in work]
        configs = [
            openvino_genai.GenerationConfig(max_new_tokens=n, ignore_eos=True, **how)
            for _, n in work
        ]
        results = self.pipeline.generate(prompts, configs)
        return [list(result.m_generation_ids[0]) for result in results]


def convert_for_openvino(model: str, folder: str) -> None:
    """Write the model in OpenVINO's format to `folder`, with weights in float32."""
    command = "from optimum.commands.optimum_cli import main; main()"
    arguments = "export openvino --task text-generation-with-past --weight-format fp32 --model"
    done = subprocess.run(
        [sys.executable, "-c", command, *arguments.split(), model, folder],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"optimum-intel cannot convert {model}:\n{done.stderr}")


ENGINES: dict[str, Callable[..., Engine]] = {
    "nanovllm": NanovllmEngine,
    "vllm": VllmEngine,
    "transformers": TransformersEngine,
    "openvino": OpenVINOEngine,
}
WITHOUT_OPTIONS = ("transformers", "openvino")  # the engines that run a model as it is


def start(name: str, model: str, **options: Any) -> tuple[Any, float]:
    """Load a model into an engine with these options, and generate a few tokens.

    Returns the engine and the seconds that this took. The seconds include the import of the
    engine's package: vLLM and transformers are imported here; nanovllm, already imported, reports
    how long its import took. The import of torch, which all engines need, is not included, and
    neither is OpenVINO's conversion of the model, which its users do once.
    """
    folder, random_weights = model_folder(model, options.get("quantization"))
    import_seconds = uncounted_import_seconds() if name == "nanovllm" else 0.0
    begin = time.perf_counter()
    engine = ENGINES[name](folder, random_weights, **options)
    engine.run([([1, 2, 3], 16)], dict(temperature=0.0))
    seconds = time.perf_counter() - begin + import_seconds
    return engine, seconds - getattr(engine, "conversion_seconds", 0.0)


def device_name() -> str:
    """Return the name of the measured device."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads"


def versions(engine: str) -> dict[str, str]:
    """Return the versions of Python, the engine, and the packages that affect its speed."""
    found = {"python": platform.python_version()}
    names = {"torch", "triton", "flash-attn", "flash-attn-4", "transformers", engine}
    for package in names | ({"openvino-genai"} if engine == "openvino" else set()):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
