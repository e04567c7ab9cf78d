"""What runs a model on a CUDA device."""
