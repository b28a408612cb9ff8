"""What an executor holds: its rows in columns, its blocks in a pool."""
