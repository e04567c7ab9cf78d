"""The engine: which tokens run when, and the device that runs them."""
