"""Backends of layers that cache one latent vector per token."""
