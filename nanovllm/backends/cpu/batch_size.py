"""The number of sequences with which a CPU is about as fast as it gets.

A step reads all weights once and multiplies them once for each sequence. Compared with its memory,
a CPU multiplies slowly, so some dozens of sequences keep it busy: more add less to the tokens a
second, and each answer comes later. A small model needs more sequences. Its products take less time
than the rest of a step, such as Python's part, which is the same for any number of sequences. So
enough sequences must run to make the products the larger part of the step.
"""

import torch

from nanovllm.backends.cpu.threads import usable_cores
from nanovllm.models.model_config import ExpertsConfig, ModelConfig

# Measured in float32 with PyTorch 2.13 on one of two cores of an AMD EPYC whose memory other
# processes used too. Tokens a second: a model of 135M parameters makes 118 with 8 sequences, 187
# with 16, 199 with 32 and 213 with 64; one of 3.8M makes 2,300 with 16, 4,100 with 64, 5,300 with
# 256 and 6,600 with 512. Where nobody else uses the memory, reading the weights takes less time,
# and fewer sequences are enough.
# A job of 200 lines of 120 tokens each, the same model on two quiet cores: with 200 at once, the
# first result after 69.5 s and all after 70.6 s; with 48, 26.6 and 92.9 s; with 16, 15.5 and 109 s.
FEWEST = 48
# A step in which a thread multiplies this many weights, counted once for each sequence, spends the
# larger part of its time on products: 2 GFLOP.
WEIGHTS_OF_A_THREAD = 10**9


def enough_sequences(num_parameters: int, model_config: ModelConfig) -> int:
    """Return the number of sequences beyond which more add little to the tokens a second.

    In a mixture of experts, a token uses only the weights of its own experts. So the number is
    multiplied by the number of experts and divided by the number of experts of a token.
    """
    threads = min(torch.get_num_threads(), usable_cores())
    enough = max(FEWEST, threads * WEIGHTS_OF_A_THREAD // num_parameters)
    if isinstance(model_config, ExpertsConfig):
        return enough * model_config.num_experts // model_config.num_experts_per_tok
    return enough
