"""Kernels of the attention backends."""
