"""Backends, which compute the same results faster or on more devices."""
