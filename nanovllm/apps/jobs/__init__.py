"""Jobs: a file of requests through an LLM to a file of results, whatever happens meanwhile.

Uses the LLM by its public calls, as any script does. Nothing else in the package imports this room
but the command line, `python -m nanovllm run`.
"""
