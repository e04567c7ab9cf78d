"""Kernels that take the place of plain layers, each tested against what it replaces."""
