"""The layer between the user's calls and the engine: inputs, session, tokenizer, outputs."""
