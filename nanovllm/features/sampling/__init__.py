"""Sampling beyond temperature and seed."""
