"""What stands between the user's calls and the engine: inputs, sessions, tokenizer, outputs."""
