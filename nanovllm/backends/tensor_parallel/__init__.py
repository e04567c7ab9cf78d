"""Tensor parallelism: the ranks' processes, the engine's commands to them, and collectives."""
