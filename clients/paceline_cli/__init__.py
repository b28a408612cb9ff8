"""The `paceline` program: its commands, the supervisor of `up`, `bench` and `chaos`. Needs the extra `cli`.

Stands on the library `paceline_client`, which knows nothing of it.
"""
