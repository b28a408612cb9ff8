"""Models out of GGUF files."""
