"""What every GPU kernel needs of a multiprocessor, found by compiling it, with no GPU there."""
