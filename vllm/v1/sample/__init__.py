"""Chooses the next token from logits, row by row of the batch."""
