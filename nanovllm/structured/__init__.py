"""Outputs of a given form: JSON by a schema, what an expression matches, a choice, a grammar."""
