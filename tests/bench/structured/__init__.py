"""Structured output measured on a running system: what of it is valid, and what it costs."""
