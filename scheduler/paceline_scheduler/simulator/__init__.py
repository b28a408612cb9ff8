"""An executor without a model for tests of the scheduler.

It keeps every rule of the plan protocol, computes tokens that prove it, and runs in virtual time.
"""
