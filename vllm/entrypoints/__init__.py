"""What users touch: `LLM`, the command line and the OpenAI-compatible server."""
