"""KV pages leave this engine, or come into it, by way of a connector."""
