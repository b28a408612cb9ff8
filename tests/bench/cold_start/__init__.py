"""How long a killed scheduler is missed: `python -m cold_start` with `tools` on the path."""
