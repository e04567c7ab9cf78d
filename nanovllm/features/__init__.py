"""Features beside plain generation, which some requests and some users ask for."""
