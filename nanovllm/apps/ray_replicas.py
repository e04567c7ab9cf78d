"""Replicas of a job's model as Ray actors, on this machine or on a cluster. Owns Ray, an extra.

Ray schedules the actors, carries requests and answers, and notices when an actor dies. What is done
then and by whom, and when an actor counts as hung, `jobs/pool.py` decides.
"""

import logging
import os
import secrets
import signal
import sys
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

from nanovllm.apps.jobs.command import local_engine
from nanovllm.apps.jobs.errors import RefusedError
from nanovllm.apps.jobs.formats import Request
from nanovllm.apps.jobs.pool import Answers, Pool, ReplicaLostError
from nanovllm.apps.ray_session import session_folder
from nanovllm.config import Config

# How long a replica works on one call. Between two calls it gives its results away, which takes it
# about a millisecond; a GPU works on meanwhile.
SERVE_SECONDS = 0.25
# A call lasts so long and one step more, which several ranks must answer within step_timeout. A
# replica counts as hung after so many times that: a step without ranks may take longer, such as one
# of long prompts on a CPU or a first one that compiles.
STEP_TIMEOUTS = 10
OBJECT_STORE = 2**28  # bytes of shared memory: large answers lie in it for a moment


class Actor:
    """A process with one LLM."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def start(self, config: Config) -> Answers:
        self._worker = self._stack.enter_context(local_engine(config))
        return []

    def serve(self, requests: list[Request], more_to_come: bool) -> Answers:
        """Queue requests, and run steps for a while. Returns what has ended."""
        refused = self._worker.add(requests)
        answers = [(request.line, {"error": problem}) for request, problem in refused]
        if not more_to_come:
            self._worker.no_more()
        end = monotonic() + SERVE_SECONDS
        while self._worker.num_unfinished and monotonic() < end:
            answers += [(request.line, output) for request, output in self._worker.step()]
        return answers


class RayCluster:
    """The `pool.Cluster` of actors."""

    def __init__(self, ray: Any, config: Config, resources: dict[str, float]) -> None:
        """`resources`: of each actor, num_cpus and num_gpus."""
        self._ray = ray
        self._config = config
        # Whether to start another one is the pool's decision.
        self._class = ray.remote(Actor).options(max_restarts=0, max_task_retries=0, **resources)

    def start(self) -> tuple[Any, Hashable]:
        actor = self._class.remote()
        return actor, actor.start.remote(self._config)

    def serve(self, handle: Any, requests: list[Request], more_to_come: bool) -> Hashable:
        return handle.serve.remote(requests, more_to_come)

    def wait(self, calls: list[Hashable], seconds: float) -> list[Hashable]:
        ended, _ = self._ray.wait(calls, num_returns=1, timeout=seconds)
        return ended

    def result(self, call: Hashable) -> Answers:
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:  # the actor raised it
            cause = error.cause
            if isinstance(cause, RefusedError):
                raise cause from None
            raise ReplicaLostError(f"{type(cause).__name__}: {cause}") from error
        except self._ray.exceptions.RayError as error:
            raise ReplicaLostError(first_sentence(str(error))) from error

    def stop(self, handle: Any) -> None:
        self._ray.kill(handle)


def first_sentence(message: str) -> str:
    """Ray adds pages of advice."""
    return message.strip().split("\n")[0].rstrip(".:")


@contextmanager
def replicas_engine(config: Config, num_replicas: int, address: str | None) -> Iterator[Pool]:
    """An engine of so many replicas, each of which has an LLM of these options.

    `address`: of a Ray cluster; None: this machine, and nothing listens beyond its loopback
    interface.

    Raises RefusedError if they cannot be started as they are asked for.
    """
    check_options(config)
    config = replace(config, model=absolute(config.model))
    # Ray prints what dies to stdout, where the job's line of totals goes.
    with redirect_stdout(sys.stderr), ExitStack() as stack:
        folder = stack.enter_context(session_folder()) if address is None else None
        ray = connect(num_replicas, address, folder)
        stack.callback(ray.shutdown)  # ends this job's actors, and a cluster begun for it
        resources = resources_of(config, num_replicas, ray.cluster_resources(), address is None)
        pool = Pool(
            RayCluster(ray, config, resources),
            num_replicas,
            config.max_num_seqs,
            start_timeout=config.start_timeout,
            answer_timeout=STEP_TIMEOUTS * config.step_timeout,
        )
        pool.wait_for_all(config.start_timeout)
        yield pool


def check_options(config: Config) -> None:
    if config.trace is not None:
        raise RefusedError("--trace is of one LLM: leave it out, or run without --replicas")
    if config.device not in ("auto", "cpu", "cuda"):
        raise RefusedError(
            f"--device is {config.device}, but each replica has GPUs of its own: use cuda"
        )


def absolute(model: str) -> str:
    """A folder's path, for processes that stand elsewhere; a hub id as it is."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def connect(num_replicas: int, address: str | None, folder: Path | None = None) -> Any:
    """Connect to the Ray cluster at `address`; or begin one on this machine for this process,
    which keeps its files in `folder`. Returns Ray.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody is told
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "2")  # 20 take minutes, if nobody answers
    if address is None:
        # Also on Linux, to keep it to the loopback interface. Ray reads this when it is imported.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        # Who connects must know a token. Ray's own would lie in a file that others may read.
        if os.environ.setdefault("RAY_AUTH_MODE", "token") == "token":
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        options: dict[str, Any] = dict(address="local", include_dashboard=False)
        options["num_cpus"] = max(num_replicas, os.cpu_count() or 1)
        options["object_store_memory"] = OBJECT_STORE
        options["_temp_dir"] = None if folder is None else str(folder)
    else:
        options = dict(address=address)
    try:
        import ray
    except ModuleNotFoundError as error:
        raise RefusedError(
            f"--replicas and --address need the package {error.name}: pip install 'nanovllm[ray]'"
        ) from error
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = "on this machine" if address is None else f"at --address {address}"
        raise RefusedError(f"cannot use Ray {where}: {error}") from error
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray's would end the process at once
    return ray


def resources_of(
    config: Config, num_replicas: int, there: dict[str, float], is_local: bool
) -> dict[str, float]:
    """What each actor takes. `there`: the cluster's resources."""
    gpus = int(there.get("GPU", 0))
    if config.device == "cpu" or (config.device == "auto" and not gpus):
        # On a cluster nobody knows how the cores are spread over machines.
        return {"num_cpus": max(1, int(there["CPU"]) // num_replicas) if is_local else 1}
    each = config.tensor_parallel_size
    if is_local and gpus < num_replicas * each:
        raise RefusedError(
            f"--replicas {num_replicas} with --tensor-parallel-size {each} take "
            f"{num_replicas * each} GPUs, and there are {gpus}"
        )
    return {"num_cpus": 1, "num_gpus": each}
