"""A model's output cut into text, reasoning and calls of tools, by the marks of its response template.

Start reading at `cutter.py`; `template.py` says what a response template is, `table.py` which models have one here.
"""
