"""What a scheduler leaves on disk for its successor: found as it was stored, or not at all."""

import os
import threading

import pytest

from paceline_scheduler.disk_cache import AsyncDiskCache, DiskCache


@pytest.fixture
def folder(tmp_path):
    """A folder that is made when it is needed."""
    return tmp_path / "cache" / "scheduler"


def only_file(folder):
    (path,) = folder.iterdir()
    return path


def test_a_successor_finds_what_was_stored(folder):
    DiskCache(folder).store("a/../b", b"first")
    DiskCache(folder).store("a/../b", b"last")
    assert DiskCache(folder).load("a/../b") == b"last"
    assert DiskCache(folder).load("b") is None
    assert only_file(folder).parent == folder


def test_a_file_that_is_cut_or_changed_anywhere_is_not_there(folder):
    DiskCache(folder).store("a", b"data")
    whole = only_file(folder).read_bytes()
    changed = [whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in range(len(whole))]
    for spoilt in [whole[:i] for i in range(len(whole))] + changed + [whole + b"x"]:
        only_file(folder).write_bytes(spoilt)
        assert DiskCache(folder).load("a") is None


def test_a_file_under_another_name_is_not_there(folder):
    cache = DiskCache(folder)
    cache.store("a", b"data")
    path = only_file(folder)
    cache.store("b", b"other")
    (path_of_b,) = set(folder.iterdir()) - {path}
    path.replace(path_of_b)
    assert cache.load("b") is None


def test_the_folder_holds_a_bounded_number_of_files_the_last_used_ones(folder):
    cache = DiskCache(folder, max_files=2)
    folder.mkdir(parents=True)
    (folder / f"{'0' * 32}.12345678").write_bytes(b"x" * 10)
    cache.store("a", b"a")
    cache.store("b", b"b")
    cache.load("a")
    cache.store("c", b"c")
    assert [cache.load(name) for name in "abc"] == [b"a", None, b"c"]
    assert len(list(folder.iterdir())) == 2


def test_what_others_put_into_the_folder_stays_and_does_not_count(folder):
    """Also a folder, which cannot be deleted like a file."""
    folder.mkdir(parents=True)
    others = {folder / name for name in ("notes.txt", "notes.cache", "00.cache", f"{'0' * 32}.py")}
    for path in others:
        path.write_bytes(b"precious")
    for name in ("sub-folder", f"{'1' * 32}.cache"):
        (folder / name).mkdir()
        others.add(folder / name)
    for path in others:
        os.utime(path, (1, 1))
    cache = DiskCache(folder, max_files=2)
    for name in "abcd":
        cache.store(name, b"data")
    left = set(folder.iterdir())
    assert left > others
    assert len(left - others) == 2


def test_what_is_no_file_is_not_read(folder):
    """Nobody writes to this pipe."""
    cache = DiskCache(folder)
    cache.store("a", b"data")
    path = only_file(folder)
    path.unlink()
    os.mkfifo(path)
    assert cache.load("a") is None


class HangingCache(DiskCache):
    """A cache on a disk that answers when the test says so."""

    def __init__(self, folder):
        super().__init__(folder)
        self.answers = threading.Event()

    def load(self, name):
        """Hang, then load."""
        self.answers.wait(30)
        return super().load(name)


@pytest.fixture
def hanging(folder):
    """Such a cache, which answers when the test is over."""
    cache = HangingCache(folder)
    cache.store("a", b"data")
    yield cache
    cache.answers.set()


async def test_an_event_loop_does_not_wait_for_a_disk_that_hangs(hanging):
    hasty = AsyncDiskCache(hanging, max_wait_s=0.01)
    assert await hasty.load("a") is None
    for number in range(20):
        hasty.store(str(number), lambda: b"data")
    assert len(hasty._storing) < 20
    hanging.answers.set()
    patient = AsyncDiskCache(hanging, max_wait_s=30)
    assert await patient.load("a") == b"data"


async def test_an_event_loop_finds_what_it_stored_before(folder):
    """Though that was not done at once."""
    cache = AsyncDiskCache(DiskCache(folder), max_wait_s=30)
    cache.store("a", lambda: b"data")
    assert await cache.load("a") == b"data"


async def test_without_a_thread_nothing_is_found_or_kept(folder, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    DiskCache(folder).store("a", b"data")
    cache = AsyncDiskCache(DiskCache(folder))
    monkeypatch.setattr("threading.Thread.start", refuse)
    cache.store("b", lambda: b"data")
    assert await cache.load("a") is None


def test_without_a_folder_nothing_is_kept():
    """As in tests, and where nobody wants it."""
    cache = DiskCache()
    cache.store("a", b"data")
    assert (cache.is_enabled, cache.load("a")) == (False, None)


def test_a_folder_that_cannot_be_made_costs_nothing_but_time(tmp_path):
    """A file is in its place; a read-only disk says the same."""
    (tmp_path / "cache").write_bytes(b"")
    cache = DiskCache(tmp_path / "cache" / "scheduler")
    cache.store("a", b"data")
    assert cache.load("a") is None


def test_a_full_disk_costs_nothing_but_time_and_leaves_no_half_of_a_file(folder, monkeypatch):
    cache = DiskCache(folder)
    cache.store("a", b"data")

    def write_half(path, data):
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", write_half)
    cache.store("a", b"other")
    assert cache.load("a") == b"data"
    only_file(folder)
