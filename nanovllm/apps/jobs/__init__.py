"""Batch jobs: a file of requests in, a file of results out, with resumption after any interruption.

A job uses only the public methods of LLM, as any script does. `python -m nanovllm run` is the
command line of jobs.
"""
