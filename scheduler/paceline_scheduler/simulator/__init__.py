"""An executor without a model for tests of the scheduler, and studies of capacity and cost.

It keeps every rule of the plan protocol, computes tokens that prove it, and runs in virtual time. What a step, a stream
or a refusal costs is measured on processes as users start them.
"""
