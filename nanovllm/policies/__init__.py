"""Scheduling policies beside the core's own, by the names that `scheduling_policy` takes."""

from collections.abc import Callable

from nanovllm.engine.policy import SchedulingPolicy
from nanovllm.policies.orders import LongestFirst, Priority, ShortestFirst
from nanovllm.policies.shared_prefix import SharedPrefixPolicy
from nanovllm.policies.throughput import ThroughputPolicy

POLICIES: dict[str, Callable[[], SchedulingPolicy]] = {
    "throughput": ThroughputPolicy,
    "fcfs": SharedPrefixPolicy,
    "shortest-first": ShortestFirst,
    "longest-first": LongestFirst,
    "priority": Priority,
}
