"""Quantised matrices of safetensors folders: a format each, all into `grouped_rows`.

What the tensors of a matrix are says how it is quantised, where they can say so: patterns of module names in a
configuration are not matched. So nothing is served by a key that its tensors contradict.
"""
