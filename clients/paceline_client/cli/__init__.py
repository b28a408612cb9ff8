"""The `paceline` command line. Needs the extra `cli`; the library does not."""
