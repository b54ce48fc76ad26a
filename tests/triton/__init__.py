"""Triton kernels without a GPU: interpreted in this process, compiled in others."""
