"""Kernels in CUDA C++ that take the place of references where a GPU has them."""
