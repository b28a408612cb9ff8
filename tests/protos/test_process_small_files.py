"""Small files that an operator names, and what may stand in their place."""

import os
import re
import socket
import threading

import pytest

from both_sides.certificates import Authority
from paceline.process.small_files import in_time, read_regular, read_small_file
from paceline.process.tls_folder import TlsFolder, TlsFolderError

GENEROUS_S = 30.0


def listen_at(path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


@pytest.mark.parametrize(
    "put",
    [os.mkfifo, listen_at, lambda path: path.symlink_to("/dev/zero"), os.mkdir],
    ids=["a FIFO", "a socket", "a device", "a folder"],
)
def test_what_is_no_file_is_refused_by_name(tmp_path, put):
    path = tmp_path / "place"
    put(path)
    with pytest.raises(OSError, match=re.escape(str(path))):
        read_small_file(path)


def test_a_file_may_have_so_many_bytes_and_no_more(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"four")
    assert read_regular(path, 4) == b"four"
    with pytest.raises(OSError, match="it has more than 3 bytes"):
        read_regular(path, 3)


def test_a_disk_that_hangs_costs_one_thread_until_it_answers():
    answers, num_threads = threading.Event(), threading.active_count()
    for patience_s in (0.01, GENEROUS_S):  # the second one waits no more
        with pytest.raises(TimeoutError, match="its disk does not answer: 'place'"):
            in_time(answers.wait, "place", patience_s)
    assert threading.active_count() == num_threads + 1
    assert in_time(lambda: 5, "another place") == 5
    answers.set()
    next(thread for thread in threading.enumerate() if thread.name == "small files").join()
    assert in_time(answers.wait, "place") is True


def test_no_thread_to_be_had_is_a_failure_to_read(monkeypatch, tmp_path):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OSError, match="can't start new thread"):
        read_small_file(tmp_path / "file")


@pytest.mark.parametrize("name", ["ca.crt", "tls.crt", "tls.key"])
def test_certificates_stay_where_a_fifo_takes_the_place_of_a_file(tmp_path, name):
    path = Authority().mount(tmp_path / "tls")
    folder = TlsFolder(path)
    before = folder.certificates()
    (path / name).unlink()
    os.mkfifo(path / name)
    assert folder.certificates() == before
    with pytest.raises(TlsFolderError, match=f"{name}: it is not a regular file"):
        TlsFolder(path)
