"""What a follower is told to become, and what it and rank 0 must agree on before anything is computed."""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from paceline_executor.share import Share
from paceline_executor.version import this_version
from paceline_executor.weights import Checkpoint


@dataclass(frozen=True, slots=True)
class Order:
    """As a node's first process has it for each of its ranks."""

    arguments: tuple[str, ...]  # its command line
    path: str  # of the model that it has found
    runner: str  # that rank 0 has chosen
    share: Share
    store_at: tuple[str, int] | None = None  # where ranks of several nodes find one another

    @classmethod
    def from_json(cls, text: str) -> "Order":
        values: dict[str, Any] = json.loads(text)
        store_at = values["store_at"] and tuple(values["store_at"])
        read = {"arguments": tuple(values["arguments"]), "share": Share(**values["share"]), "store_at": store_at}
        return cls(**values | read)

    def json(self) -> str:
        return json.dumps(asdict(self))


def identity_of(whole: Checkpoint, device: str) -> dict[str, str]:
    """By what it is called where ranks differ. device: for people."""
    model = hashlib.blake2b(f"{whole.config} {whole.digest}".encode(), digest_size=16)
    return {"version": this_version(), "model": model.hexdigest(), "device": device}
