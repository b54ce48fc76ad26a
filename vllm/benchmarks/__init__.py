"""Measurements behind `vllm bench`: speed and accuracy, never asserted in tests."""
