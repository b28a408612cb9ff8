"""Schedulers and executors as processes of their own, and what they log."""
