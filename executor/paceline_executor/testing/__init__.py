"""What tests of the executor, ours and users, build on: factories, no assertions."""
