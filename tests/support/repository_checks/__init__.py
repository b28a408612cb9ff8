"""The rules of this repository as functions: what `tests/repository` asserts, without a test framework.

Knows files and syntax trees. Refuses to know the programs: nothing here imports a Paceline package.
"""
