"""The executor's rows: what is known of each request, and the one place where that changes.

Knows token ids, blocks and plans as numpy columns. It refuses to know gRPC, protobuf, threads, time and torch: times
are passed in, and the device is behind `runner.interface`.
"""
