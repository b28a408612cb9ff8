"""What the product needs, with the versions that are installed, and what was found out about it, for `make audit`.

`python -m repository_checks.audit` prints the first, `python -m repository_checks.audit FILE` the second, of what
pip-audit has written; it ends with 1 unless everything was looked up and nothing is known against it. What only tests
need is not looked at.
"""

import json
import sys
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PRODUCT = "paceline[cli,scheduler,executor,gateway]"
_OURS = frozenset({"paceline", "paceline-client", "paceline-protos"})


def pins(requirement: str = PRODUCT) -> list[str]:
    """Return `name==version` for each distribution that a requirement leads to, our own left out, by name."""
    seen: dict[tuple[str, str], None] = {}
    found: dict[str, str] = {}
    waiting = list(_with_extras(Requirement(requirement)))
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen[name, extra] = None
        installed = distribution(name)
        found[name] = installed.version.partition("+")[0]  # without where it was built
        for line in installed.requires or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                waiting += _with_extras(needed)
    return [f"{name}=={version}" for name, version in sorted(found.items()) if name not in _OURS]


def _with_extras(requirement: Requirement) -> Iterable[tuple[str, str]]:
    """A distribution, and it once more with each of its extras."""
    name = canonicalize_name(requirement.name)
    return [(name, extra) for extra in ("", *sorted(requirement.extras))]


def complaint(path: Path) -> str:
    """Return what is wrong by what pip-audit has written there; empty if nothing is."""
    try:
        found = json.loads(path.read_text())["dependencies"]
    except (OSError, ValueError):
        return _not_looked_up("nothing was looked up")
    known = [f"{one['name']} {one['version']}: {flaw['id']}" for one in found for flaw in one.get("vulns", ())]
    skipped = [one["name"] for one in found if "skip_reason" in one]
    if skipped:
        known.append(_not_looked_up(f"{len(skipped)} of {len(found)} were not looked up, such as {skipped[0]}"))
    return "\n".join(known)


def _not_looked_up(what: str) -> str:
    return (
        f"{what}: the service that knows vulnerabilities cannot be reached, or does not know them. dist/sbom.cdx.json"
        " is written: audit it where there is a network. dist/audit.log says more."
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(complaint(Path(sys.argv[1])) or None)
    print("\n".join(pins()))
