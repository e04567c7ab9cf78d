"""Scheduling policies by the names that `scheduling_policy` takes."""

from collections.abc import Callable

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
