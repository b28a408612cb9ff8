"""One program per engine: reads what to run on stdin, answers with raw timings. Run by the engine's own interpreter.

Imports the standard library and the engine, so that it works in an environment that has nothing else.
"""
