"""One device: batches, caches as views, the model runner."""
