"""What clients that hardly read cost those that do: `python -m slow_clients` with `tools` on the path."""
