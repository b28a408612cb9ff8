"""The whole system in one process and in virtual time: real schedulers and clients, simulated executors and network.

One seed gives one run: its requests, its faults and every latency. `python -m simulation --seed N --story` tells it.
"""
