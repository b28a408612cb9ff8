"""What a model may call, and its calls. What these may be is the server's to check."""

from dataclasses import dataclass

from paceline_client.forms import Schema, schema_text


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Schema | None = None
    """Of its arguments; None: it takes none."""
    strict: bool | None = None
    """True: arguments are valid against `parameters`."""

    @property
    def parameters_json_schema(self) -> str | None:
        """`InvalidRequestError` for what is no JSON."""
        return None if self.parameters is None else schema_text(self.parameters, "tools.parameters")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool. `arguments` is a JSON object as the model wrote it."""

    id: str
    name: str
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Whether and which tools are called. `mode` is "auto", "none" or "required"; `name` that of the one called."""

    mode: str | None = None
    name: str | None = None
    parallel_calls: bool | None = None
    """False: at most one call."""
