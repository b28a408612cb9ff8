"""Speculation: guesses how rows go on, so that a step may verify several tokens of one.

Drafters of runners that compute on their host are modules here. One that reads tokens alone needs nothing else; one
with a model runs it in `Drafter.draft`. Hidden states of the target are the runner's to show, batch by batch.
"""
