"""Blocks kept in host memory and on disk: one module decides, one moves bytes."""
