"""Makes operations ready before the first step: what to call, and the process that compiles what is not on disk."""
