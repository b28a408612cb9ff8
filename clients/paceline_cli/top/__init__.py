"""`paceline top`: what a scheduler and its executors do now, and the few things an operator may change.

`wire` and `source` bring what a scheduler tells, `state` adds it up, `screen` draws it as lines, `controls` says what a
key means, `terminal` puts both on a screen.
"""
