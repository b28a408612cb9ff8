"""Generates Python modules and descriptor set of `protos/paceline/v1`. Run as a module, it replaces the committed ones.

Knows the pinned compiler of the development environment (`grpcio-tools`, `mypy-protobuf`) and nothing of buf.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from repository_checks.programs import BIN, run
from repository_checks.sources import GENERATED_SUFFIXES, PROTOS

FOLDER = Path("paceline", "v1")
DESCRIPTORS = FOLDER / "paceline.binpb"
"""All protos with their comments, in one file: what other languages make their stubs of."""


def generate(protos: Path, destination: Path) -> None:
    """Compile `protos/paceline/v1/*.proto` to files under `destination`; a proto that is wrong ends the program."""
    (destination / FOLDER).mkdir(parents=True, exist_ok=True)
    outputs = ("python_out", "grpc_python_out", "mypy_out", "mypy_grpc_out")
    result = run(
        "python",
        *("-m", "grpc_tools.protoc", f"-I{protos}"),
        *(f"--plugin=protoc-gen-{name}={BIN / f'protoc-gen-{name}'}" for name in ("mypy", "mypy_grpc")),
        *(f"--{output}={destination}" for output in outputs),
        *("--include_imports", "--include_source_info", f"--descriptor_set_out={destination / DESCRIPTORS}"),
        *sorted((protos / FOLDER).glob("*.proto")),
    )
    if result.returncode:
        sys.exit(result.stdout)


def generated_files(folder: Path) -> dict[str, bytes]:
    suffixes = (*GENERATED_SUFFIXES, DESCRIPTORS.suffix)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name.endswith(suffixes)}


def main() -> None:
    """Replace the committed modules, so that none outlives its proto."""
    with tempfile.TemporaryDirectory() as temporary:
        generate(PROTOS, Path(temporary))
        for name in generated_files(PROTOS / FOLDER):
            (PROTOS / FOLDER / name).unlink()
        for name in generated_files(Path(temporary) / FOLDER):
            shutil.copy(Path(temporary) / FOLDER / name, PROTOS / FOLDER / name)


if __name__ == "__main__":
    main()
