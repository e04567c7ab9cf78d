"""Runners that ranks run instead of ModelRunner in tests: some fail, one has no model.

A module of its own, since the processes of the ranks import it.
"""

import json
import os
import pickle
import signal
import sys
import time
from dataclasses import replace

import numpy as np
import torch

from nanovllm.backends.tensor_parallel import worker
from nanovllm.backends.tensor_parallel.answers import Done, pack_answer
from nanovllm.engine.batch import RunnerInfo
from nanovllm.engine.model_runner import ModelRunner, SampledTokens

CPU = torch.device("cpu")


def set_fault(monkeypatch, rank: int, where: str, action: str) -> None:
    """Let `rank` fail at its first `where`, "start", "prefill" or "decode".

    `action`: "kill" itself, "raise EOFError", or "hang".
    """
    monkeypatch.setenv("RANK_FAULT", json.dumps([rank, where, action]))
    monkeypatch.setattr("nanovllm.build.build_runner", FaultyRunner)


class FaultyRunner(ModelRunner):
    def __init__(self, *args, group, **options):
        rank, self.where, self.action = json.loads(os.environ["RANK_FAULT"])
        self.is_faulty = rank == group.rank
        self.fail_at("start")
        super().__init__(*args, device=CPU, group=group, **options)

    def launch(self, batch):
        self.fail_at("prefill" if batch.prefills else "decode")
        return super().launch(batch)

    def fail_at(self, where):
        if not self.is_faulty or where != self.where:
            return
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.action == "raise EOFError":
            raise EOFError("the planted end")
        time.sleep(1000)


class StarvedRunner(ModelRunner):
    """Has room for 20 blocks on rank 1, and for 30 elsewhere."""

    def __init__(self, config, *args, group, **options):
        config = replace(config, num_kvcache_blocks=20 if group.rank == 1 else 30)
        super().__init__(config, *args, device=CPU, group=group, **options)


class EchoRunner:
    """Has no model: answers each row's number, and for a prompt its length."""

    def __init__(self, *args, group, **options):
        assert "transformers" not in sys.modules, "a rank need not import it, and it takes seconds"
        self.group = group
        self.info = RunnerInfo(
            100, "cpu", "float32", "none", 64, num_parameters=0, kv_cache_bytes=0
        )

    def launch(self, batch):
        tokens = [*batch.decode_slots, *(len(chunk.token_ids) for chunk in batch.prefills)]
        return SampledTokens(torch.tensor(tokens))

    def synchronize(self):
        pass


class FlagsRunner(EchoRunner):
    """Says as its attention backend how its interpreter was started."""

    def __init__(self, *args, group, **options):
        super().__init__(*args, group=group, **options)
        self.info = replace(self.info, attention=f"{sys.flags}")


class LeavesAFile:
    """Pickled, has whoever unpickles it make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "x")


class LyingRunner(EchoRunner):
    """Answers a step, on rank 1, with other bytes than an answer's: RANK_LIE says which."""

    def launch(self, batch):
        lie, path = json.loads(os.environ["RANK_LIE"])
        answers = {
            "a pickle": pickle.dumps(LeavesAFile(path)),
            "another result": pack_answer(Done(1, np.zeros((1, 3), np.float32))),
        }
        if self.group.rank == (lie != "another result"):
            worker.pack_answer = lambda _: answers[lie]
        return super().launch(batch)
