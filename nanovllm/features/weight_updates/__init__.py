"""New weights for a running model, and sleep, which lends its memory to others."""
