"""Upload: stored tensors onto a torch device, converted there, through a fixed amount of host memory.

`staging` brings bytes over, `conversion` makes numbers of them, `matrices` puts them to their places.
"""
