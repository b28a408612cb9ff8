"""What compiles forms here. Apart from the rest, as whoever places requests needs only its name, and reads no disk."""

VERSION = "1.9.1"

LIBRARY = f"llguidance {VERSION}, forms 2"
"""What masks depend on: the library's version, and that of what it is told, raised with each new kind of form.
Executors with another one are given no request with a form.
"""
