"""What tests of the scheduler and of programs beside it are made of: a clock, requests, a collector of outputs."""
