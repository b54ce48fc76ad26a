"""Attention: the backend contract, its backends, and their kernels."""
