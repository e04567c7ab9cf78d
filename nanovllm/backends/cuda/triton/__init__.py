"""Triton kernels, each with a plain twin."""
