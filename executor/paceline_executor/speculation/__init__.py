"""Speculation: guesses how rows go on, so that a step may verify several tokens of one.

A drafter that reads tokens alone is a module here. One with a model runs it in `Drafter.draft`, on the step thread. One
that needs hidden states belongs behind the runner.
"""
