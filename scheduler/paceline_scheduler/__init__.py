"""The scheduler of Paceline: decides for every step what each executor runs, and serves clients."""
