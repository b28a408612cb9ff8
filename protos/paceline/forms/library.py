"""What compiles forms here. Apart from the rest, as whoever places requests needs only its name, and reads no disk."""

VERSION = "1.9.1"

LIBRARY = f"llguidance {VERSION}"
"""With its version, which masks depend on: executors with another one are given no request with a form."""
