"""The README's figures: `make figures` measures them on this machine and prints the table."""
