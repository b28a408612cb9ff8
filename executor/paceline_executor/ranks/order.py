"""What rank 0 tells a follower to become, and what both must agree on before anything is computed."""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from paceline_executor.version import this_version
from paceline_executor.weights import Checkpoint


@dataclass(frozen=True, slots=True)
class Order:
    """As rank 0 has it for each rank."""

    arguments: tuple[str, ...]  # rank 0's command line
    path: str  # of the model that it has found
    runner: str  # that it has chosen
    degree: int

    @classmethod
    def from_json(cls, text: str) -> "Order":
        values: dict[str, Any] = json.loads(text)
        return cls(**values | {"arguments": tuple(values["arguments"])})

    def json(self) -> str:
        return json.dumps(asdict(self))


def identity_of(whole: Checkpoint, device: str) -> dict[str, str]:
    """By what it is called where ranks differ. device: for people."""
    model = hashlib.blake2b(f"{whole.config} {whole.digest}".encode(), digest_size=16)
    return {"version": this_version(), "model": model.hexdigest(), "device": device}
