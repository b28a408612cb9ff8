"""What only GPUs have. Without Triton, which is for Linux, none of it can be imported."""

import importlib.util

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
