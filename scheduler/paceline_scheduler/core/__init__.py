"""The scheduler's core: token ids, rows and blocks; events and a time in, plans and outputs out.

It does no I/O, reads no clock and draws no random number, so that production, simulation and tests run the same code.
"""
