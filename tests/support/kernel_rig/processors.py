"""Which instructions tests can try on this machine.

Knows the order in which processors got them; not what they are used for. Apart, because attention and products are
both tested on each of them.
"""

from paceline_kernels.vector.integers import Processor, this_processor


def usable_processors() -> list[Processor]:
    """The kinds of processor that this one can stand for: itself and those that have less."""
    kinds = list(Processor)
    return kinds[: kinds.index(this_processor()) + 1]
