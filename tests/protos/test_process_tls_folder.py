"""The folder of certificates: read again when it changes, and as it was while it is damaged."""

import pytest

from both_sides.certificates import Authority
from paceline.process import tls_folder
from paceline.process.tls_folder import TlsFolder, TlsFolderError, is_loopback


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """As much as a busy machine may need."""
    monkeypatch.setattr(tls_folder, "_PATIENCE_S", 60.0)


@pytest.fixture
def authority():
    """Who issues."""
    return Authority()


@pytest.fixture
def path(authority, tmp_path):
    """A folder as it is mounted."""
    return authority.mount(tmp_path / "tls")


def on_disk(path):
    """What is in the files now."""
    return tuple((path / name).read_bytes() for name in ("ca.crt", "tls.crt", "tls.key"))


def held(folder):
    """What the folder gives."""
    found = folder.certificates()
    return found.roots, found.chain, found.key


def test_renewed_files_are_given_from_then_on(authority, path):
    folder = TlsFolder(path)
    first = on_disk(path)
    assert held(folder) == first
    authority.mount(path)
    assert held(folder) == on_disk(path) != first


@pytest.mark.parametrize("name", ["ca.crt", "tls.crt", "tls.key"])
@pytest.mark.parametrize("content", [None, b"", b"nonsense", b"another's"])
def test_a_file_that_is_damaged_or_of_another_pair_changes_nothing(path, tmp_path, name, content):
    folder = TlsFolder(path)
    before = on_disk(path)
    file = path / name
    whole = file.read_bytes()
    file.unlink()
    if content is not None:
        other = Authority().mount(tmp_path / "other") / "tls.key"
        file.write_bytes(other.read_bytes() if content == b"another's" else content)
    assert held(folder) == before
    with pytest.raises(TlsFolderError, match=r"has to hold ca\.crt, tls\.crt and tls\.key"):
        TlsFolder(path)
    file.unlink(missing_ok=True)
    file.write_bytes(whole)
    assert held(folder) == before


def test_a_key_is_in_no_text(path):
    assert "PRIVATE" not in repr(TlsFolder(path).certificates())


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),  # noqa: S104  nothing listens
     ("10.0.0.1", False), ("example.org", False), ("localhost.example.org", False), ("", False)],
)  # fmt: skip
def test_only_a_loopback_is_reached_by_this_machine_alone(host, is_ours):
    assert is_loopback(host) is is_ours
