"""Reads the images' Dockerfiles: what they run while they are built, and what a container of them is."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from repository_checks.sources import ROOT

IMAGES = ROOT / "helm" / "images"


@dataclass(frozen=True, slots=True)
class Image:
    """A Dockerfile: `instructions` as (name, rest) in order, with lines that go on joined."""

    name: str
    instructions: tuple[tuple[str, str], ...]

    def all_of(self, instruction: str) -> list[str]:
        return [rest for name, rest in self.instructions if name == instruction]

    @property
    def entrypoint(self) -> list[str]:
        return _words(self.all_of("ENTRYPOINT"))

    @property
    def command(self) -> list[str]:
        return _words(self.all_of("CMD"))

    @property
    def health_check(self) -> list[str]:
        """The command of HEALTHCHECK, without its options."""
        return _words([rest.partition("CMD ")[2] for rest in self.all_of("HEALTHCHECK")])

    @property
    def environment(self) -> dict[str, str]:
        return dict(pair.split("=", 1) for rest in self.all_of("ENV") for pair in rest.split())

    @property
    def copied(self) -> list[str]:
        """The files and folders of the repository that it copies."""
        return [word for rest in self.all_of("COPY") if "--from" not in rest for word in rest.split()[:-1]]


def read_image(name: str) -> Image:
    """The image of this name, `paceline-` before that of its Dockerfile; FileNotFoundError for another."""
    return parse(name, (IMAGES / f"{name.removeprefix('paceline-')}.Dockerfile").read_text(encoding="utf-8"))


def all_images() -> list[Image]:
    return [read_image(path.stem) for path in sorted(IMAGES.glob("*.Dockerfile"))]


def image_of(reference: str) -> Image:
    path: str = Path(reference.partition("@")[0]).name
    return read_image(path.partition(":")[0])


def parse(name: str, text: str) -> Image:
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines)
    found = (line.partition(" ") for line in joined.splitlines() if line)
    return Image(name, tuple((word, rest.strip()) for word, _, rest in found))


def _words(forms: list[str]) -> list[str]:
    """The last one counts, and is a JSON list: a shell in between would keep signals from the program."""
    return [str(word) for word in json.loads(forms[-1])]
