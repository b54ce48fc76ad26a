"""Arguments that make an engine."""
