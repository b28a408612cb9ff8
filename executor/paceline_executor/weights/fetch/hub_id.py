"""How a user names a model of the Hugging Face hub: `org/name`, or `org/name:FILE.gguf`, or `org/name:Q4_K_M`.

This is the spelling of llama.cpp and vLLM. Apart from `hub`, because a name is understood before anything is fetched.
"""

import re
from dataclasses import dataclass

COMMIT = re.compile(r"[0-9a-f]{40}")
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_ID = re.compile(rf"(?=[^:]{{3,96}}(?::|$))({_NAME}/{_NAME})(?::([A-Za-z0-9][A-Za-z0-9._-]{{0,200}}))?")

_URL = re.compile(rf"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/({_NAME}/{_NAME})(?:[/?#].*)?")


@dataclass(frozen=True, slots=True)
class HubId:
    repository: str  # "org/name"
    choice: str | None = None  # a GGUF file, or a quantisation such as "Q4_K_M"

    def __str__(self) -> str:
        return self.repository if self.choice is None else f"{self.repository}:{self.choice}"


def parse_hub_id(text: str) -> HubId | None:
    """None where `text` is not spelt like a name of the hub, as most paths are not."""
    found = _ID.fullmatch(text)
    if found is None or found[1].endswith((".gguf", ".git")) or ".." in text or "--" in text:
        return None  # FILE.gguf is a path that does not exist
    return HubId(found[1], found[2])


def name_in_url(text: str) -> str | None:
    """The name of the model that a page of the hub shows."""
    found = _URL.fullmatch(text)
    return None if found is None else found[1]
