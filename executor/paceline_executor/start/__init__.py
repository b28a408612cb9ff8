"""Start: from a configuration to an engine that serves."""
