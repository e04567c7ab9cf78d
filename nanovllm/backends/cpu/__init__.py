"""The backend that makes a model fast on a CPU: oneDNN, kernels in C++, and the use of threads."""
