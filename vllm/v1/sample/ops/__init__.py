"""Row-wise operations on logits and probabilities."""
