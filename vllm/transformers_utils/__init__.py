"""Reads what a model brings along: where it lies, its config, tokenizer, templates."""
