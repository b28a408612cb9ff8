"""The pictures of the documents, drawn from measured data that lies beside them.

`figures` takes from a run's results what a picture shows, `drawing` draws it, `__main__` is the command. `screens` does
both for the screen of `paceline top`.
"""
