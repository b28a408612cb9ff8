"""`paceline token`: a secret that is printed once, and a line that the scheduler believes."""

import os
import stat

import pytest
from typer.testing import CliRunner

from paceline.process.callers import Role
from paceline_cli.app import app
from paceline_scheduler.access.tokens import TokenFile


@pytest.fixture
def file(tmp_path):
    """Where the scheduler will look."""
    return tmp_path / "tokens.jsonl"


def make(file, *options):
    """Run the command; returns the secret."""
    result = CliRunner().invoke(app, ["token", "--tokens", str(file), *options])
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout.splitlines()) == 1
    return result.stdout.strip()


def test_a_token_is_known_to_the_scheduler_by_its_hash_alone(file):
    """Each is another one, of at least 256 bits, and stands nowhere but on stdout."""
    blue, red = make(file, "--tenant", "blue"), make(file, "--tenant", "red", "--name", "the red team's")
    ops = make(file, "--role", "operator")
    assert len({blue, red, ops}) == 3
    assert all(len(bytes.fromhex(secret)) == 32 for secret in (blue, red, ops))
    assert not [secret for secret in (blue, red, ops) if secret in file.read_text()]
    tokens = TokenFile(file)
    assert [tokens.find(secret).caller.tenant for secret in (blue, red, ops)] == ["blue", "red", None]
    assert tokens.find(red).caller.name == "the red team's"
    assert tokens.find(ops).caller.roles == {Role.OPERATOR}


def test_only_its_owner_may_read_a_new_file(file):
    """Hashes of random secrets help nobody, but whose tokens there are is nobody's business."""
    make(file, "--tenant", "blue")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_token_whose_hash_would_be_in_no_file_is_not_made(file):
    os.mkfifo(file)
    result = CliRunner().invoke(app, ["token", "--tokens", str(file), "--tenant", "blue"])
    assert (result.stdout, result.stderr) == ("", f"error: tokens: cannot write {file}: it is not a regular file\n")


def test_a_line_without_its_end_is_not_joined_to_the_next(file):
    first = make(file, "--tenant", "blue")
    file.write_text(file.read_text().rstrip("\n"))
    second = make(file, "--tenant", "red")
    tokens = TokenFile(file)
    assert tokens.find(first)
    assert tokens.find(second)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ([], "tenant: is missing"),
        (["--tenant", ""], "tenant: has to have 1 to 128 bytes"),
        (["--tenant", "x" * 129], "tenant: has to have 1 to 128 bytes"),
        (["--tenant", "x", "--name", "n" * 129], "name: has to have 1 to 128 bytes"),
    ],
)
def test_what_the_scheduler_would_not_read_is_not_written(file, options, complaint):
    """It would go on with its old tokens, and complain of the file."""
    result = CliRunner().invoke(app, ["token", "--tokens", str(file), *options])
    assert (result.exit_code, result.stdout) == (65, "")
    assert complaint in result.stderr
    assert not file.exists()


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    """No secret is printed that nobody would know."""
    result = CliRunner().invoke(app, ["token", "--tokens", str(tmp_path / "no" / "folder"), "--tenant", "x"])
    assert (result.exit_code, result.stdout) == (65, "")
    assert "cannot write" in result.stderr
