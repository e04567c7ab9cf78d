"""The replicas of a job's model as Ray actors, on this machine or on a cluster.

Only this file imports Ray, an optional package. Ray schedules the actors, carries requests and
answers, and notices when an actor dies. jobs/pool.py decides when an actor counts as hung, and what
to do about lost actors.
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

# How long a replica works on one call. Between two calls, it returns its results, which takes about
# a millisecond, during which the GPU keeps working.
SERVE_SECONDS = 0.25
# A call takes SERVE_SECONDS and at most one step more, which several ranks must answer within
# step_timeout. A replica counts as hung after STEP_TIMEOUTS * step_timeout, because a step without
# ranks may take longer than step_timeout: long prompts on a CPU, or a first step that compiles.
STEP_TIMEOUTS = 10
OBJECT_STORE = 2**28  # bytes of shared memory, through which large answers pass


class Actor:
    """A Ray actor, which is a process with one LLM."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def start(self, config: Config) -> Answers:
        """Load the model. Returns no answers."""
        self._worker = self._stack.enter_context(local_engine(config))
        return []

    def serve(self, requests: list[Request], more_to_come: bool) -> Answers:
        """Queue requests, and run steps for SERVE_SECONDS. Returns the finished answers."""
        refused = self._worker.add(requests)
        answers = [(request.line, {"error": problem}) for request, problem in refused]
        if not more_to_come:
            self._worker.no_more()
        end = monotonic() + SERVE_SECONDS
        while self._worker.num_unfinished and monotonic() < end:
            answers += [(request.line, output) for request, output in self._worker.step()]
        return answers


class RayCluster:
    """An implementation of `pool.Cluster` with Ray actors."""

    def __init__(self, ray: Any, config: Config, resources: dict[str, float]) -> None:
        """Define the actors.

        resources: num_cpus and num_gpus of each actor.
        """
        self._ray = ray
        self._config = config
        # Ray must not restart actors: the pool decides whether to start another one.
        self._class = ray.remote(Actor).options(max_restarts=0, max_task_retries=0, **resources)

    def start(self) -> tuple[Any, Hashable]:
        """Create an actor, and begin to load its model."""
        actor = self._class.remote()
        return actor, actor.start.remote(self._config)

    def serve(self, handle: Any, requests: list[Request], more_to_come: bool) -> Hashable:
        """Send requests to an actor."""
        return handle.serve.remote(requests, more_to_come)

    def wait(self, calls: list[Hashable], seconds: float) -> list[Hashable]:
        """Wait until one of the calls has ended, at most `seconds`."""
        ended, _ = self._ray.wait(calls, num_returns=1, timeout=seconds)
        return ended

    def result(self, call: Hashable) -> Answers:
        """Return the answers of a call.

        Raises ReplicaLostError if the call failed, RefusedError for a wrong option.
        """
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
        """Kill an actor."""
        self._ray.kill(handle)


def first_sentence(message: str) -> str:
    """Return the first line of a message of Ray, without the pages of advice that follow."""
    return message.strip().split("\n")[0].rstrip(".:")


@contextmanager
def replicas_engine(config: Config, num_replicas: int, address: str | None) -> Iterator[Pool]:
    """Yield an engine of replicas, each with an LLM of these options.

    address: the address of a Ray cluster; None: start Ray on this machine, where nothing listens
        beyond the loopback interface.

    Raises RefusedError if the replicas cannot be started with these options.
    """
    check_options(config)
    config = replace(config, model=absolute(config.model))
    # Ray reports dead actors on stdout, where only the job's line of totals should go.
    with redirect_stdout(sys.stderr), ExitStack() as stack:
        folder = stack.enter_context(session_folder()) if address is None else None
        ray = connect(num_replicas, address, folder)
        stack.callback(ray.shutdown)  # ends the actors, and a cluster that was started for this job
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
    """Raise RefusedError for options that do not work with replicas."""
    if config.trace is not None:
        raise RefusedError(
            "--trace records a single LLM: leave --trace out, or run without --replicas"
        )
    if config.device not in ("auto", "cpu", "cuda"):
        raise RefusedError(
            f"--device is {config.device}, but Ray assigns GPUs to each replica: use cuda"
        )


def absolute(model: str) -> str:
    """Make a folder's path absolute, for processes in other folders. Returns a hub id unchanged."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def connect(num_replicas: int, address: str | None, folder: Path | None = None) -> Any:
    """Connect to the Ray cluster at `address`, and return the module ray.

    Without an address, start Ray on this machine for this process, with its files in `folder`.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send no usage statistics
    os.environ.setdefault(
        "RAY_NUM_REDIS_GET_RETRIES", "2"
    )  # the default of 20 takes minutes if nothing answers
    if address is None:
        # 0 keeps Ray to the loopback interface, on Linux too. Ray reads this when it is imported.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        # Clients must know this token. Ray would keep its own in a file that others may read.
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
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray's handler would end the process at once
    return ray


def resources_of(
    config: Config, num_replicas: int, there: dict[str, float], is_local: bool
) -> dict[str, float]:
    """Return the resources of each actor. Raises RefusedError if there are too few GPUs.

    there: the resources of the cluster.
    """
    gpus = int(there.get("GPU", 0))
    if config.device == "cpu" or (config.device == "auto" and not gpus):
        # How the cores of a cluster are spread over its machines is unknown.
        return {"num_cpus": max(1, int(there["CPU"]) // num_replicas) if is_local else 1}
    each = config.tensor_parallel_size
    if is_local and gpus < num_replicas * each:
        raise RefusedError(
            f"--replicas {num_replicas} with --tensor-parallel-size {each} take "
            f"{num_replicas * each} GPUs, and there are {gpus}: use fewer"
        )
    return {"num_cpus": 1, "num_gpus": each}
