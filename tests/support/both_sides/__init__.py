"""A scheduler's own code and executors' own, in one process, without a model and without gRPC: for tests of both."""
