"""Formats of weights and of KV caches that callers import by these paths."""
