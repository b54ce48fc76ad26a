"""Connectors: how pages move. They see geometry, never what the bytes mean."""
