"""From a model's name to filled parameters."""
