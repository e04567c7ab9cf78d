"""Programs on top of `LLM`."""
