"""Speculation: guesses how rows go on, so that one step may verify several tokens of a row.

Plans say how many drafts a row may have, a `Drafter` finds them, and the forward pass computes them like known tokens.
What is drawn after each says which of them count (`runner.acceptance`), so a bad draft costs time and changes no token.

A drafter that reads tokens alone is a module here, as `prompt_lookup` is. One with a model of its own runs that in
`Drafter.draft`, on the step thread. One that goes on from the target's hidden states drafts where those are, behind the
runner.
"""
