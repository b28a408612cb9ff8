"""Starts the services' processes, keeps them running and ends them in order. What `up` and `demo` have in common."""
