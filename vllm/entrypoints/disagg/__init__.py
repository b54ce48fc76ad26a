"""Serving in which prompts are computed by other engines than what follows."""
