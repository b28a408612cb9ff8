"""How CPU code is compiled, kept on disk and called; it knows no operation."""
