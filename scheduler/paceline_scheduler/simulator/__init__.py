"""An executor without a model: it keeps every rule of the plan protocol and computes tokens that prove it.

`executor` is pure and runs inside tests; `server` puts it behind the real gRPC service for load tests.
"""
