"""The figures of MEASURED.md: `make figures` measures them on this machine and prints the table."""
