"""Several ranks: their processes, how they are commanded, and their collectives."""
