"""What looks on while the runtime feeds the core: each sees every event with its effects, and every planning.

An observer changes nothing of what it sees. It refuses to know what becomes of it.
"""
