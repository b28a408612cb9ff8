"""What tests of the executor build on: runners, engines, plans; no assertions."""
