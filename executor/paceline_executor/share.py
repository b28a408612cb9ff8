"""Which ranks a node has. Nodes, which are machines or containers, have as many each, in order."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """A node's, of a group."""

    degree: int  # ranks of the group
    node: int = 0
    num_nodes: int = 1

    @property
    def ranks(self) -> range:
        return self.ranks_of(self.node)

    @property
    def followers(self) -> range:
        """The child processes of the node's first one, which is rank 0, or the head of another node and no rank."""
        return self.ranks[1:] if self.node == 0 else self.ranks

    def ranks_of(self, node: int) -> range:
        num = self.degree // self.num_nodes
        return range(node * num, (node + 1) * num)

    def name_of(self, rank: int) -> str:
        """For people."""
        return f"rank {rank}" if self.num_nodes == 1 else f"rank {rank} on node {rank // len(self.ranks)}"
