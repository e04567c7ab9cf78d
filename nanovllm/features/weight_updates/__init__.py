"""New weights for a running model, and its memory lent to others."""
