"""Where the scheduler is reached: its ports, which service answers where, and what health checks are told."""
