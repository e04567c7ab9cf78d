"""The backend that runs a model on CUDA devices."""
