"""`paceline top`: what a scheduler and its executors do now, and the few things an operator may change.

`wire` and `source` bring what a scheduler tells, `state` adds it up, `screen` says how it looks, `live` shows it on a
terminal and says what keys do.
"""
