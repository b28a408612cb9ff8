"""Spans. `tracing` switches them on."""
