"""A record of what an engine does, to watch afterwards: `LLM(..., trace=path)` writes it."""
