"""Scheduling policies beside the core's own, which is first come, first served."""
