"""One manager for each kind of KV cache group."""
