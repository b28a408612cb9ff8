"""What compiles forms here. Apart from the rest, as whoever places requests needs only its name."""

from importlib import metadata

LIBRARY = f"llguidance {metadata.version('llguidance')}"
"""With its version, which masks depend on: executors with another one are given no request with a form."""
