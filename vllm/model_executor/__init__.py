"""Models: layers, the decoders made of them, and what loads their weights."""
