"""What a simulated executor raises when a plan breaks a rule of the protocol. It is never caught on the way.

Apart, because every part of the executor raises it.
"""


class PlanViolationError(Exception):
    """A plan that no executor may accept: a mistake of the scheduler, not of its peers.

    `rule` names the rule in a few words, such as `write to a shared block`; the message says where.
    """

    def __init__(self, rule: str, where: str) -> None:
        super().__init__(f"{rule}: {where}")
        self.rule = rule
        self.where = where


def require(holds: bool, rule: str, where: str) -> None:
    """Raise a PlanViolationError unless the rule holds."""
    if not holds:
        raise PlanViolationError(rule, where)
