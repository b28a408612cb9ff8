"""What rank 0 tells a follower to become, and what both must agree on before anything is computed."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline_executor.limits import RowLimits
from paceline_executor.version import this_version
from paceline_executor.weights import Checkpoint, load_checkpoint
from paceline_executor.weights.dummy import dummy_checkpoint


@dataclass(frozen=True, slots=True)
class Order:
    """As rank 0 has chosen it for each rank."""

    path: str
    is_dummy: bool
    degree: int
    num_threads: int
    limits: RowLimits
    log_level: str

    @classmethod
    def from_json(cls, text: str) -> "Order":
        values: dict[str, Any] = json.loads(text)
        return cls(**values | {"limits": RowLimits(**values["limits"])})

    def json(self) -> str:
        return json.dumps(asdict(self))

    def open(self) -> Checkpoint:
        """The whole model. Raises ModelError."""
        return dummy_checkpoint(Path(self.path)) if self.is_dummy else load_checkpoint(Path(self.path))


def identity_of(checkpoint: Checkpoint) -> dict[str, str]:
    """By what it is called where ranks differ."""
    model = hashlib.blake2b(f"{checkpoint.config} {checkpoint.digest}".encode(), digest_size=16)
    return {"version": this_version(), "model": model.hexdigest()}
