"""Scheduling policies by the names that `scheduling_policy` takes."""

from collections.abc import Callable
from typing import Any

from nanovllm.checks import short_repr
from nanovllm.engine.policy import SchedulingPolicy
from nanovllm.features.policies.orders import LongestFirst, Priority, ShortestFirst
from nanovllm.features.policies.shared_prefix import SharedPrefixPolicy
from nanovllm.features.policies.throughput import ThroughputPolicy

POLICIES: dict[str, Callable[[], SchedulingPolicy]] = {
    "throughput": ThroughputPolicy,
    "fcfs": SharedPrefixPolicy,
    "shortest-first": ShortestFirst,
    "longest-first": LongestFirst,
    "priority": Priority,
}


def choose_policy(given: Any) -> SchedulingPolicy:
    """Return the policy that the option `scheduling_policy` gives, by name or as an object."""
    if isinstance(given, str):
        return POLICIES[given]()
    if isinstance(given, type):
        raise TypeError(
            f"scheduling_policy is the class {given.__name__}: give an object of it, such as "
            f"{given.__name__}()"
        )
    methods = [name for name in vars(SchedulingPolicy) if not name.startswith("_")]
    methods.remove("reason")  # only a trace asks for it
    if lacking := [name for name in methods if not callable(getattr(given, name, None))]:
        raise TypeError(
            f"scheduling_policy is {short_repr(given)}, which has no method {lacking[0]}: "
            "derive its class from nanovllm.SchedulingPolicy, or use one of "
            f"{', '.join(map(repr, POLICIES))}"
        )
    return given
