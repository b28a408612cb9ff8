"""How long a killed scheduler is missed: `python -m cold_start` with `tests/bench` on the path."""
