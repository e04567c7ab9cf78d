"""Sampling of rows that ask for more than a temperature and a seed.

`resampler.py` samples these rows a second time, from logits that one file each has changed:
`logits_edits.py`, `penalties.py` and `filters.py`. `slot_params.py` holds their parameters on the
device. On the host, `constraints.py` says which tokens may come next, by `grammars.py` for
structured outputs. `logprobs.py` makes the log-probabilities that requests ask for.
"""
