"""READMEs do what they say: every `sh` and `python` block is run, against one real system.

The blocks are found when tests are collected, so each is a test of its own, named by file and line.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from repository_checks import grpcurl
from repository_checks.programs import BIN
from repository_checks.readme import as_script, broken_links, install_grpcurl, runnable_blocks, undecided_fences
from repository_checks.sources import ROOT, documents

DOCUMENTS = documents()
MAX_README_WORDS = 900
BLOCKS = [
    block
    for document in DOCUMENTS
    for block in runnable_blocks(document.relative_to(ROOT), document.read_text(encoding="utf-8"))
]
INTERPRETERS = {
    "sh": ["bash", "-euo", "pipefail", "-c"],
    "python": [sys.executable, "-W", "error", "-c"],
}
README = """
```sh
make test PYTHON=python3.12
make demo  # a comment
paceline up --model smollm2-135m-instruct
paceline chat
```

```text
rm -rf / is not run
```

```python
print("localhost:50051")
```
"""


@pytest.fixture(scope="session")
def search_path(tmp_path_factory):
    """Where a newcomer's shell looks: not in this environment, but there is a grpcurl that `buf curl` answers."""
    folder = tmp_path_factory.mktemp("bin")
    install_grpcurl(folder)
    elsewhere = [part for part in os.environ["PATH"].split(os.pathsep) if Path(part) != BIN]
    return os.pathsep.join([str(folder), *elsewhere])


def run_block(block, search_path, addresses):
    """Run a block to its end as a reader would, one line typed into whatever asks for one."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    environment["PATH"] = search_path
    environment.pop("VIRTUAL_ENV", None)
    if "localhost:50051" in addresses:
        environment["PACELINE_TARGET"] = addresses["localhost:50051"]
    return subprocess.run(
        [*INTERPRETERS[block.language], as_script(block, addresses, typed_before=typed_before(block))],
        cwd=ROOT,
        env=environment,
        input="What is the capital of France?\n",
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=250,
        check=False,
    )


def typed_before(block):
    """The blocks of the same document that a reader has typed into the same shell."""
    return [other for other in BLOCKS if other.path == block.path and other.line < block.line]


def with_tier(block):
    """A block as a case: `make test` runs the first README's but the demonstration, which starts its own system."""
    is_slow = block.path != Path("README.md") or "make demo" in block.text
    marks = [pytest.mark.slow] * is_slow
    if block.talks_to_the_system:
        marks.append(pytest.mark.xdist_group("running_system"))  # as `conftest` does for those that name the fixture
    return pytest.param(block, id=str(block), marks=marks)


@pytest.mark.parametrize("block", [*map(with_tier, BLOCKS)])
def test_what_a_readme_says_can_be_run(block, search_path, request):
    addresses = request.getfixturevalue("running_system").addresses if block.talks_to_the_system else {}
    if block.own_ports:
        first = request.getfixturevalue("first_free_port")
        addresses = {port: str(first + number) for number, port in enumerate(block.own_ports)}
    result = run_block(block, search_path, addresses)
    assert result.returncode == 0, result.stdout
    assert result.stdout.strip() or not block.talks_to_the_system


def test_the_readme_has_the_two_commands_of_a_newcomer():
    commands = "".join(block.text for block in BLOCKS if block.path == Path("README.md"))
    assert "make demo" in commands
    assert "make test" in commands


def test_only_blocks_that_say_so_are_run():
    shell, program = runnable_blocks(Path("README.md"), README)
    assert (str(shell), shell.language) == ("README.md:2", "sh")
    assert (str(program), program.language) == ("README.md:13", "python")


def name_of(document):
    return str(document.relative_to(ROOT))


def test_the_readme_is_read_in_minutes():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= MAX_README_WORDS


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_link_leads_somewhere(document):
    assert list(broken_links(document)) == []


def test_a_link_to_nothing_is_found(tmp_path):
    document = tmp_path / "README.md"
    document.write_text("# One & two\n[a](no.md) [b](#three) [c](README.md#one--two) [d](https://e.org/f#g)\n")
    assert list(broken_links(document)) == ["no.md", "#three"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_block_is_run_or_says_that_it_is_only_shown(document):
    assert list(undecided_fences(document.relative_to(ROOT), document.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "text",
    [
        "```\nmake test\n```\n",
        "```bash\nls\n```\n",
        "~~~sh\nls\n~~~\n",
        "  ```sh\n  ls\n  ```\n",
        "```sh\nls\n",
        "```sh x\nls\n```\n",
    ],
    ids=["bare", "unknown", "tildes", "indented", "open", "with a remark"],
)
def test_a_block_that_would_not_be_run_unnoticed_is_refused(text):
    first, *_ = undecided_fences(Path("README.md"), f"{README}{text}")
    assert first == f"README.md:{README.count(chr(10)) + 1}: {text.splitlines()[0]}"


def test_services_that_a_block_starts_get_ports_that_are_free():
    text = "```sh\npaceline-executor --port 51061 --health-port 0 &\npaceline models --target localhost:51061\n```\n"
    (block,) = runnable_blocks(Path("README.md"), text)
    assert (block.own_ports, block.talks_to_the_system) == (["51061"], False)
    assert as_script(block, {"51061": "7"}).splitlines() == [
        "paceline-executor --port 7 --health-port 0 &",
        "paceline models --target localhost:7",
    ]


def test_what_would_not_end_is_looked_up_left_out_or_shortened():
    """`make test` would run itself, `paceline up` stays up, and a chat is as long as the model likes."""
    shell, program = runnable_blocks(Path("README.md"), README)
    assert as_script(shell, {}).splitlines() == [
        "make --dry-run --always-make test PYTHON=python3.12",
        "make demo  # a comment",
        ": paceline up --model smollm2-135m-instruct",
        "paceline chat --temperature 0 --max-tokens 16",
    ]
    assert as_script(program, {"localhost:50051": "127.0.0.1:7"}) == 'print("127.0.0.1:7")\n'


def test_a_shell_finds_the_commands_once_it_was_told_where():
    text = "```sh\n. .venv/bin/activate\nmake demo\n```\n\n```sh\npaceline models\n```\n"
    first, second = runnable_blocks(Path("README.md"), text)
    assert as_script(second, {}, typed_before=[first]) == ". .venv/bin/activate\npaceline models\n"
    assert as_script(second, {}) == "paceline models\n"


def test_a_command_of_this_environment_is_not_found_by_itself(search_path):
    """Else nobody would notice that a README does not say where it is."""
    (block,) = runnable_blocks(Path("README.md"), "```sh\npaceline --version\n```\n")
    assert "paceline: command not found" in run_block(block, search_path, {}).stdout


def test_a_block_that_fails_is_reported(search_path):
    for text in ("false\ntrue", "make test-of-nothing"):
        (block,) = runnable_blocks(Path("README.md"), f"```sh\n{text}\n```\n")
        assert run_block(block, search_path, {}).returncode != 0


def test_grpcurl_with_an_option_that_is_not_known_is_refused():
    """The stand-in never ignores what it does not understand."""
    with pytest.raises(SystemExit, match="2"):
        grpcurl.parse(["-plaintext", "-unknown", "localhost:1", "list"])
