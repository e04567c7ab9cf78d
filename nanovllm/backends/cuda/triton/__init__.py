"""Triton kernels. For each of them there is a plain function that computes the same: its twin."""
