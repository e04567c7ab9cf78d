"""Sampling parameters beyond temperature and seed: filters, penalties, constraints, forms."""
