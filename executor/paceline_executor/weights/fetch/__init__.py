"""From what a user calls a model to a file or folder here."""
