"""Decisions: what an executor runs next, whom it takes and what to expect of it. Reads, and changes nothing."""
