"""What some requests and some users ask for, beside plain generation."""
