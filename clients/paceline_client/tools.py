"""What a model may call, and its calls. What these may be is the server's to check."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool. `arguments` is a JSON object as the model wrote it."""

    id: str
    name: str
    arguments: str = ""
