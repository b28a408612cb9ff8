"""The scheduler's side of the plan protocol: dial executors, attach, send plans, take results, notice when one is gone.

Reading order: `transport`, `plan_stream`, `executor_link`, `fleet`, `listener`, `executors`.
"""
