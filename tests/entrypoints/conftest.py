"""Fixtures of the engine's tests."""

from tests.tiny_model import tiny_model  # noqa: F401
