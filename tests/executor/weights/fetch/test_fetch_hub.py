"""A model of the Hugging Face hub is fetched whole and checked, goes on where it stopped, and is found offline.

The hub is a stand-in on this machine that answers as the real one does.
"""

import errno
import json
import shutil
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants, file_download, hf_hub_download, scan_cache_dir, snapshot_download
from huggingface_hub.utils import WeakFileLock

from paceline_executor.config import parse_config
from paceline_executor.errors import HubUnreachableError, ModelFetchError, ModelNotFoundError, UnsupportedModelError
from paceline_executor.start.opening import served_name
from paceline_executor.weights import FetchOptions, FetchPhase, resolve_model
from paceline_executor.weights.fetch import fetching, hub, hub_client
from paceline_executor.weights.fetch.hub_id import HubId, parse_hub_id
from random_models.hub import MAIN_COMMIT, OTHER_COMMIT, hub_stand_in

LARGE = bytes(range(256)) * (12 << 10)  # 3 MiB: longer than what is written at once
INDEX = json.dumps({"weight_map": {"x": "part-1.safetensors", "y": "part-2.safetensors"}}).encode()
FOLDER = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "generation_config.json": b"{ }",
    "model.safetensors.index.json": INDEX,
    "part-1.safetensors": b"more weights",
    "part-2.safetensors": b"weights",
    "consolidated.safetensors": b"the same weights once more",
    "pytorch_model.bin": b"pickle",
    "modeling_own.py": b"raise SystemExit",
    "original/params.json": b"{}",
}
GGUF = {"README.md": b"#", "tiny-Q4_K_M.gguf": b"GGUF 4", "tiny-Q8_0.gguf": b"GGUF 8", "tiny-IQ4_K_M.gguf": b"GGUF i"}


class Place:
    """A hub, the cache of its own library, that of earlier versions, and everything that was reported."""

    def __init__(self, folder, hub):
        self.hub = hub
        self.cache, self.earlier = folder / "huggingface", folder / "cache"
        self.root = self.cache / "models--org--folder"
        self.progress = []

    def resolve(self, name="org/folder", *, on_progress=None, revision=None, offline=False):
        """Ask for a model."""
        return resolve_model(
            name,
            cache_dir=self.earlier,
            on_progress=on_progress or self.progress.append,
            options=FetchOptions(revision, self.hub.endpoint, offline),
        )

    def contents(self, path):
        """What is in a folder."""
        return {file.name: file.read_bytes() for file in path.iterdir()}

    def fetched(self, **options):
        """Make the model whole; returns what was downloaded for that."""
        self.hub.requests.clear()
        assert self.contents(self.resolve(**options)) == NEEDED
        return {name for name, _ in self.hub.downloads()}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A hub that runs and an empty cache; nobody is logged in."""
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "huggingface"))
    with hub_stand_in({"org/folder": dict(FOLDER), "org/gguf": dict(GGUF)}) as hub:
        yield Place(tmp_path, hub)
        close_session()


@pytest.fixture
def large(place, monkeypatch):
    """The same with a file that arrives in several parts; nobody waits between attempts."""
    monkeypatch.setattr(file_download.time, "sleep", lambda _: None)
    place.hub.repositories["org/folder"]["part-1.safetensors"] = LARGE
    return place


NEEDED = {
    name: FOLDER[name]
    for name in (
        *("config.json", "tokenizer.json", "generation_config.json"),
        *("model.safetensors.index.json", "part-1.safetensors", "part-2.safetensors"),
    )
}


def test_a_model_is_fetched_to_where_the_library_of_the_hub_finds_it(place):
    path = place.resolve()
    assert path == place.root / "snapshots" / MAIN_COMMIT
    assert place.contents(path) == NEEDED
    last = place.progress[-1]
    assert last.phase is FetchPhase.DOWNLOADING
    assert last.num_bytes == last.total_bytes == sum(map(len, NEEDED.values())) - len(INDEX)  # which comes first
    assert snapshot_download("org/folder", cache_dir=place.cache, local_files_only=True) == str(path)
    scan = scan_cache_dir(place.cache)
    assert (scan.warnings, scan.size_on_disk) == ([], sum(map(len, NEEDED.values())))


def test_what_the_library_of_the_hub_fetched_is_not_fetched_again(place):
    """Half a snapshot is made whole, and a link whose blob is gone is replaced."""
    first = ("config.json", "part-1.safetensors")
    for name in first:
        hf_hub_download("org/folder", name, cache_dir=place.cache, endpoint=place.hub.endpoint)
    with pytest.raises(ModelFetchError, match="HF_HUB_OFFLINE forbids"):
        place.resolve(offline=True)
    place.hub.requests.clear()
    assert place.fetched() == NEEDED.keys() - set(first)
    (place.resolve() / "part-2.safetensors").resolve().unlink()
    assert place.fetched() == {"part-2.safetensors"}
    assert place.fetched(offline=True) == place.fetched(revision=MAIN_COMMIT) == set()


def test_what_an_earlier_version_fetched_is_used_until_it_is_gone(place):
    """Where it lies, and a file that it lacks is fetched."""
    folder = place.earlier / "hub" / "org--folder" / MAIN_COMMIT
    (folder.parent / "refs").mkdir(parents=True)
    (folder.parent / "refs" / "main").write_text(MAIN_COMMIT)
    folder.mkdir()
    for name, data in NEEDED.items():
        (folder / name).write_bytes(data)
    assert place.resolve() == place.resolve(offline=True) == place.resolve(revision=MAIN_COMMIT) == folder
    assert place.hub.downloads() == []
    assert not place.cache.exists()
    (folder / "part-2.safetensors").unlink()
    assert place.fetched() == {"part-2.safetensors"}
    shutil.rmtree(place.earlier)
    assert place.fetched() == NEEDED.keys() - {"part-2.safetensors"}
    assert place.resolve().is_relative_to(place.cache)


def test_the_template_of_chats_with_tools_is_fetched_to_where_it_was(place):
    name = "additional_chat_templates/tool_use.jinja"
    place.hub.repositories["org/folder"] |= {
        name: b"{{ tools }}",
        "additional_chat_templates/rag.jinja": b"",
        f"x/{name}": b"",
    }
    folder = place.resolve()
    assert [path.name for path in (folder / "additional_chat_templates").iterdir()] == ["tool_use.jinja"]
    assert (folder / name).read_bytes() == b"{{ tools }}"
    assert place.resolve() == place.resolve(offline=True) == folder
    assert [each for each, _ in place.hub.downloads()].count("tool_use.jinja") == 1


@pytest.mark.parametrize("index", ["", "gptq_model-4bit.safetensors.index.json"])
def test_weights_are_fetched_whatever_an_older_tool_called_them(place, index):
    names = {"config.json", "tokenizer.json", "quantize_config.json", "part-1.safetensors"}
    files = dict.fromkeys((*names, "consolidated.safetensors"), b"{}")
    if index:
        names |= {index, "part-2.safetensors"}
        files |= {index: INDEX, "part-2.safetensors": b"weights"}
    place.hub.repositories["org/old"] = files
    path = place.resolve("org/old")
    assert place.contents(path).keys() == names
    assert place.resolve("org/old", offline=True) == path


def test_a_head_is_fetched_without_a_tokenizer(place):
    options = FetchOptions(None, place.hub.endpoint, has_tokenizer=False)
    names = ("config.json", "model.safetensors")
    place.hub.repositories["org/head"] = dict.fromkeys((*names, "tokenizer_config.json", "d2t.npy"), b"{}")
    path = resolve_model("org/head", cache_dir=place.cache, on_progress=place.progress.append, options=options)
    assert place.contents(path).keys() == set(names)
    with pytest.raises(UnsupportedModelError, match=r"it has no 'tokenizer\.json'"):
        place.resolve("org/head")


def test_what_is_there_is_not_fetched_again(place):
    """Only the branch is looked up; a commit needs not even that."""
    path = place.resolve()
    place.hub.requests.clear()
    place.progress.clear()
    assert place.resolve() == path
    assert place.resolve(revision=MAIN_COMMIT) == path
    assert place.hub.requests == [("/api/models/org/folder", 0)]
    assert place.progress == []


@pytest.mark.parametrize("revision", ["v1", "refs/pr/1", OTHER_COMMIT])
def test_a_revision_leads_to_its_commit(place, revision):
    """A tag, a reference with slashes, a commit: each is in the path."""
    assert place.resolve(revision=revision).name == OTHER_COMMIT
    assert place.resolve().name == MAIN_COMMIT


def test_a_cut_connection_goes_on_where_it_broke(large):
    large.hub.cut_after = [(1 << 20) + 1000, (1 << 20) + 5]
    path = large.resolve()
    assert (path / "part-1.safetensors").read_bytes() == LARGE
    starts = [start for name, start in large.hub.downloads() if name == "part-1.safetensors"]
    assert starts == [0, 1 << 20, 2 << 20]
    verified = [progress.num_bytes for progress in large.progress if progress.phase is FetchPhase.VERIFYING]
    assert verified == [1 << 20, 2 << 20, 3 << 20]


def test_a_reset_connection_goes_on_where_it_broke(large):
    large.hub.cut_after, large.hub.resets = [(2 << 20) + 1000, 0], True
    assert (large.resolve() / "part-1.safetensors").read_bytes() == LARGE
    assert [name for name, _ in large.hub.downloads()].count("part-1.safetensors") == 3


def test_a_later_start_goes_on_where_an_earlier_one_was_ended(large):
    def interrupt(progress):
        if progress.phase is FetchPhase.DOWNLOADING and progress.num_bytes > 1 << 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        large.resolve(on_progress=interrupt)
    large.hub.requests.clear()
    assert large.contents(large.resolve()) == NEEDED | {"part-1.safetensors": LARGE}
    starts = dict(large.hub.downloads())
    assert starts["part-1.safetensors"] >= 1 << 20
    assert "config.json" not in starts


def test_a_fetch_that_ended_at_any_file_is_completed(place):
    """By its commit, too, of which the hub is asked only where a file is missing."""
    for name in NEEDED:
        path = f"/org/folder/resolve/{MAIN_COMMIT}/{name}"
        place.hub.refusals[path] = (503, "")
        with pytest.raises(HubUnreachableError, match="answers 503"):
            place.resolve()
        del place.hub.refusals[path]
        assert name in place.fetched(revision=MAIN_COMMIT)
        shutil.rmtree(place.cache)


def test_a_connection_that_is_always_cut_is_an_error(large):
    large.hub.cut_after = [0] * 100
    with pytest.raises(HubUnreachableError, match="start again, which goes on where this stopped"):
        large.resolve()


def test_without_a_network_the_cache_is_used(place):
    """By HF_HUB_OFFLINE, or because the hub gave no usable answer."""
    path = place.resolve()
    place.hub.requests.clear()
    assert place.resolve(offline=True) == place.resolve(offline=True, revision=MAIN_COMMIT) == path
    assert place.hub.requests == []
    place.hub.refusals["/api/models/org/folder"] = (503, "")
    assert place.resolve() == path


def test_offline_what_is_not_there_is_refused(place):
    """A model never fetched, a revision never fetched, a file that is gone."""
    sentence = "does not have all of revision {} of org/folder, and HF_HUB_OFFLINE forbids .*: start once without it"
    with pytest.raises(ModelFetchError, match=f"there is no folder org/folder here; .*{sentence.format('main')}"):
        place.resolve(offline=True)
    (place.resolve() / "part-2.safetensors").unlink()
    with pytest.raises(ModelFetchError, match=sentence.format("v1")):
        place.resolve(offline=True, revision="v1")
    with pytest.raises(ModelFetchError, match=sentence.format("main")):
        place.resolve(offline=True)
    with pytest.raises(ModelFetchError, match="does not have smollm2-135m-instruct, and HF_HUB_OFFLINE forbids"):
        place.resolve("smollm2-135m-instruct", offline=True)


LISTING, FILE = "/api/models/org/folder", f"/org/folder/resolve/{MAIN_COMMIT}/config.json"
REFUSALS = {
    "unknown": (LISTING, 401, "RepoNotFound", ModelNotFoundError, "as a name of the hub: .* has no model org/folder"),
    "gated": (FILE, 403, "GatedRepo", ModelFetchError, r"accept its terms at https://\S*/org/folder, then set"),
    "gated to a stranger": (FILE, 401, "GatedRepo", ModelFetchError, "set HF_TOKEN or run 'hf auth login'"),
    "forbidden": (FILE, 403, "", ModelFetchError, r"refuses access to org/folder \(403\): set HF_TOKEN"),
    "gone": (FILE, 404, "EntryNotFound", ModelNotFoundError, "lacks a file"),
    "down": (LISTING, 503, "", HubUnreachableError, "answers 503"),
    "too many": (LISTING, 429, "", HubUnreachableError, "answers 429"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_the_hub_refuses_is_said_with_what_to_do(place, name):
    path, status, code, error, message = REFUSALS[name]
    place.hub.refusals[path] = (status, code)
    with pytest.raises(error, match=message) as refusal:
        place.resolve()
    assert "\n" not in str(refusal.value)


def test_a_wrong_revision_is_named(place):
    with pytest.raises(ModelNotFoundError, match="org/folder has no revision 'v9': check --revision"):
        place.resolve(revision="v9")
    assert place.hub.downloads() == []
    with pytest.raises(ModelNotFoundError, match="only models of the Hugging Face hub have revisions"):
        place.resolve("smollm2-135m-instruct", revision="v1")


def test_a_token_is_sent_to_the_hub(place, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    place.resolve()
    assert place.hub.tokens == {"Bearer hf_secret"}


@pytest.mark.parametrize("name", ["part-2.safetensors", "config.json"])
def test_a_damaged_file_is_not_kept(place, name):
    """Large ones are known by SHA-256, small ones by git's hash; the next start fetches them anew."""
    place.hub.damaged[name] = bytes(reversed(FOLDER[name]))
    with pytest.raises(ModelFetchError, match=rf"{name} of org/folder has digest .* was published"):
        place.resolve()
    place.hub.damaged.clear()
    assert name in place.fetched()


def test_a_model_in_a_cache_that_cannot_be_written_to_is_used(place, monkeypatch):
    path = place.resolve()
    shutil.rmtree(place.root / "refs")
    (place.root / "refs").touch()
    monkeypatch.setattr(hub, "locked", None)
    assert place.resolve() == path
    shutil.rmtree(place.root)
    place.root.touch()
    with pytest.raises(ModelFetchError, match="set HF_HUB_CACHE to a folder that can be written to"):
        place.resolve()


def test_a_disk_without_links_has_the_files_themselves(place, monkeypatch):
    def none(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", none)
    assert place.fetched() == NEEDED.keys()
    assert place.fetched() == set()


def test_a_full_disk_is_said_before_the_download_and_after(place, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub_client, "http_get", full)
    with pytest.raises(ModelFetchError, match=r"cannot store org/folder in .*No space left on device\): make room"):
        place.resolve()
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda _: fetching.shutil._ntuple_diskusage(1, 1, 1))
    with pytest.raises(ModelFetchError, match=r"to fetch org/folder: make room, or set HF_HUB_CACHE"):
        place.resolve()


def test_several_at_once_download_once(place):
    threads = [threading.Thread(target=place.resolve) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = [name for name, _ in place.hub.downloads()]
    assert sorted(names) == sorted(set(names))


def test_what_another_program_is_fetching_is_waited_for(place):
    digest = (place.resolve() / "part-1.safetensors").resolve().name
    shutil.rmtree(place.root)
    place.progress.clear()
    with ExitStack() as held:
        held.enter_context(WeakFileLock(place.cache / ".locks" / place.root.name / f"{digest}.lock"))

        def let_go(progress):
            place.progress.append(progress)
            if progress.phase is FetchPhase.WAITING:
                held.close()

        assert place.contents(place.resolve(on_progress=let_go)) == NEEDED
    assert FetchPhase.WAITING in {progress.phase for progress in place.progress}


@pytest.mark.parametrize("choice", ["Q4_K_M", "q4_k_m", "tiny-Q4_K_M.gguf"])
def test_a_gguf_file_is_chosen_by_its_name_or_quantisation(place, choice):
    """As llama.cpp and vLLM write it; only that file is fetched."""
    path = place.resolve(f"org/gguf:{choice}")
    assert path == place.cache / "models--org--gguf" / "snapshots" / MAIN_COMMIT / "tiny-Q4_K_M.gguf"
    assert place.contents(path.parent) == {"tiny-Q4_K_M.gguf": b"GGUF 4"}


def test_a_choice_that_is_not_clear_is_refused_with_the_choices(place):
    with pytest.raises(ModelNotFoundError, match=r"org/gguf has several GGUF files: give one as .* tiny-Q8_0\.gguf"):
        place.resolve("org/gguf")
    with pytest.raises(ModelNotFoundError, match="org/gguf has no GGUF file 'Q2_K'"):
        place.resolve("org/gguf:Q2_K")
    place.hub.repositories["org/gguf"] = {"only.gguf": b"GGUF"}
    assert place.resolve("org/gguf").name == "only.gguf"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"pytorch_model.bin": b""}, r"weights are in pytorch_model\.bin, a kind of file that may contain code"),
        ({"README.md": b""}, r"neither model\.safetensors nor a GGUF file"),
        ({"model.safetensors": b"", "tokenizer.json": b""}, r"it has no 'config\.json'"),
        ({"model.safetensors": b"", "config.json": b""}, r"it has no 'tokenizer\.json'"),
        ({"sub/model.safetensors": b"", "../../x.gguf": b""}, "neither"),
        ({"a.safetensors": b"", "b.safetensors": b""}, r"neither .* its 'a\.safetensors', 'b\.safetensors' hold"),
    ],
)
def test_a_repository_without_a_model_says_what_is_missing(place, files, message):
    place.hub.repositories["org/folder"] = files
    with pytest.raises(UnsupportedModelError, match=message):
        place.resolve()
    assert place.hub.downloads() == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubId("org/name")),
        ("Qwen/Qwen2.5-0.5B_x", HubId("Qwen/Qwen2.5-0.5B_x")),
        ("org/name:Q4_K_M", HubId("org/name", "Q4_K_M")),
        ("org/name:a-b.gguf", HubId("org/name", "a-b.gguf")),
        ("models/own.gguf", None),
        ("name", None),
        ("a/b/c", None),
        ("/a/b", None),
        ("./a/b", None),
        ("../b", None),
        ("org/..", None),
        ("org/name:../x", None),
        ("org/name:", None),
        ("org/name\n", None),
        ("org/" + 93 * "n", None),
        ("org/name.git", None),
        ("~/name", None),
    ],
)
def test_names_of_the_hub_are_told_from_paths(text, expected):
    assert parse_hub_id(text) == expected


def test_requests_call_a_model_of_the_hub_as_it_was_asked_for(place):
    """By its path, too; other folders are called what they are."""
    for name in ("org/folder", "org/gguf:Q8_0"):
        assert served_name(parse_config(["--model", name]), place.resolve(name)) == name
    mine = place.earlier / "snapshots" / "My-Model-1.5"
    mine.mkdir(parents=True)
    for folder, name in ((place.resolve(), "org/folder"), (mine, "My-Model-1.5")):
        assert served_name(parse_config(["--model", str(folder)]), folder) == name


LOOK = """
import sys
from pathlib import Path
from paceline_executor.weights import FetchOptions, resolve_model
resolve_model(".", cache_dir=Path("c"), on_progress=print)
assert "huggingface_hub" not in sys.modules
resolve_model("m/nosuch", cache_dir=Path("c"), on_progress=print, options=FetchOptions(offline=True))
"""


def test_the_environment_says_where_the_cache_is_and_a_path_does_not_ask():
    looked = subprocess.run([sys.executable, "-c", LOOK], env={"HF_HOME": "x"}, capture_output=True, check=False)
    assert b"as a name of the hub: x/hub/models--m--nosuch does not have" in looked.stderr


@pytest.mark.parametrize(("value", "expected"), [("", False), ("0", False), ("1", True), ("TRUE", True)])
def test_the_environment_may_forbid_and_redirect_fetching(monkeypatch, value, expected):
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example")
    config = parse_config(["--revision", "v1"])
    assert (config.offline, config.hub_endpoint, config.revision) == (expected, "https://hub.example", "v1")
