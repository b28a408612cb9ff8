"""What clients that hardly read cost those that do: `python -m slow_clients` with `tests/bench` on the path."""
