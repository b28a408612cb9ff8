"""The scheduler's edge without a core: its client and its server, what is asked of a backend, small tokenizers."""
