"""Parsers of foreign bytes, tried with bytes that nobody thought of.

Knows what each of them may raise. Refuses to know how its inputs are found (`__main__`).
"""
