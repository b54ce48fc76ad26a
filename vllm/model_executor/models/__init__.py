"""Models that can be served, one file per family, over one shared decoder."""
