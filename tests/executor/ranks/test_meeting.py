"""How nodes meet and talk, without processes: who is let in, who is named as missing, what a connection may carry."""

import json
import select
import socket
import threading
from contextlib import closing, contextmanager, suppress

import numpy as np
import pytest

from both_sides.certificates import Authority
from paceline.process.ports import PortError
from paceline_executor.config import parse_config
from paceline_executor.errors import RankError
from paceline_executor.ranks import group as group_module
from paceline_executor.ranks import meeting as meeting_module
from paceline_executor.ranks.group import RankGroup
from paceline_executor.ranks.link import Link, LinkMessage
from paceline_executor.ranks.meeting import Meeting, hello_of, join
from paceline_executor.ranks.memory import NUM_POSTS
from paceline_executor.ranks.order import Order
from paceline_executor.share import Share

GENEROUS_S = 30.0


def config_of(node, *options, count=3, port=0):
    common = ["--tensor-parallel-size", str(2 * count), "--node", f"{node}/{count}@127.0.0.1:{port}"]
    return parse_config([*common, *options])


class Meetings:
    """What they open is closed at the end."""

    def __init__(self):
        self._meetings, self._links = [], []

    def meeting(self, *options, patience_s=GENEROUS_S, **others):
        """Node 0's."""
        self._meetings.append(Meeting(config_of(0, *options, **others), patience_s))
        return self._meetings[-1]

    def joined(self, meeting, node, *options, **others):
        link = join(config_of(node, *options, port=meeting.port, **others), 0)
        self._links.append(link)
        return link

    def close(self):
        for meeting in self._meetings:
            meeting._end_s = 0
            with suppress(RankError, OSError):
                self._links += meeting.links().values()
        for link in self._links:
            link.close()


@pytest.fixture
def meetings():
    with closing(Meetings()) as meetings:
        yield meetings


@pytest.fixture
def meeting(meetings):
    """Of node 0, which waits for two others."""
    return meetings.meeting()


def test_nodes_that_do_not_come_are_named(meetings):
    with pytest.raises(RankError, match=r"nodes 1, 2 have not come within 0\.01 s: look at their logs"):
        meetings.meeting(patience_s=0.01).links()
    meeting = meetings.meeting(patience_s=0.5)
    meetings.joined(meeting, 1)
    with pytest.raises(RankError, match="node 2 has not come"):
        meeting.links()


def test_node_0_has_the_links_of_all_once_all_have_come(meetings, meeting):
    theirs = {node: meetings.joined(meeting, node) for node in (2, 1)}
    links = meeting.links()
    for node, link in theirs.items():
        sent = bytes([node]) * 3_000_000
        sending = threading.Thread(target=links[node].send, args=(LinkMessage.BATCH, sent))
        sending.start()
        assert link.receive_one(LinkMessage.BATCH, GENEROUS_S) == sent
        sending.join()
    with pytest.raises(RankError, match=r"node 0 at 127\.0\.0\.1:\d+ was not reached within 0 s: Connection refused"):
        meetings.joined(meeting, 1)


def test_a_port_that_is_in_use_is_said(meeting):
    with pytest.raises(PortError, match="Address already in use; choose another with --node"):
        Meeting(config_of(0, port=meeting.port))


@pytest.mark.parametrize(
    ("node", "options", "others", "why"),
    [
        (2, ["--max-num-seqs", "7"], {}, "node 0 has another --max-num-seqs: give all nodes the same"),
        (2, [], {"count": 4}, "this group has nodes 0 to 2"),
        (1, [], {}, "node 1 is here already"),
    ],
)
def test_who_cannot_stay_is_told_why_and_the_others_are_waited_for(meetings, meeting, node, options, others, why):
    meetings.joined(meeting, 1)
    with pytest.raises(RankError, match=f"node 0 refuses this one: .*{why}"):
        meetings.joined(meeting, node, *options, **others)
    meetings.joined(meeting, 2)
    assert set(meeting.links()) == {1, 2}


def test_another_version_is_refused(meeting, monkeypatch):
    hello = hello_of(config_of(1)) | {"version": "0.0.1"}
    monkeypatch.setattr(meeting_module, "hello_of", lambda _: hello_of(config_of(0)))
    with link_to(meeting.port) as link:
        link.send(LinkMessage.HELLO, json.dumps(hello).encode())
        assert b"node 0 has version" in link.receive_one(LinkMessage.HELLO, GENEROUS_S)


def test_a_node_that_was_started_again_takes_its_own_place(meetings, meeting):
    meetings.joined(meeting, 1).close()
    meetings.joined(meeting, 1)
    meetings.joined(meeting, 2)
    assert all(link.is_open() for link in meeting.links().values())


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x01\0\0\0\xff\xff\xff\x7f",
        b"\x05\0\0\0\0\0\0\x01",  # node 0 takes no batches
        b"\x01\0\0\0\2\0\0\0[]",
        b"\x06\0\0\0\0\0\0\0",
        b"\x01\0\0\0\1\0\0\0{",
        b"\x01\0\0\0\2\0\0\0{}",
    ],
)
def test_whoever_sends_something_else_is_not_let_in(meetings, meeting, garbage):
    """Nor keeps others out who say nothing."""
    with socket.create_connection(("127.0.0.1", meeting.port)) as silent, link_to(meeting.port) as stranger:
        stranger._connection.sendall(garbage)
        if not garbage:
            stranger._connection.shutdown(socket.SHUT_WR)
        assert select.select([stranger], [], [], GENEROUS_S)[0]
        for node in (1, 2):
            meetings.joined(meeting, node)
        assert set(meeting.links()) == {1, 2}
        assert silent.fileno() >= 0


@contextmanager
def link_to(port):
    link = Link(socket.create_connection(("127.0.0.1", port)), to_node_0=True)
    try:
        yield link
    finally:
        link.close()


@pytest.fixture
def authority():
    return Authority()


def test_nodes_that_show_the_certificates_of_executors_talk_both_ways_at_once(meetings, authority, tmp_path):
    tls = ["--tls-dir", str(authority.mount(tmp_path / "executor", "paceline://executor"))]
    meeting = meetings.meeting(*tls, count=2)
    theirs = meetings.joined(meeting, 1, *tls, count=2)
    ours = meeting.links()[1]
    batch, answers = b"x" * 9_000_000, [b"y" * 60_000] * 200
    received = []

    def send_and_receive():
        for answer in answers:
            theirs.send(LinkMessage.ANSWER, answer)
        received.append(theirs.receive_one(LinkMessage.BATCH, GENEROUS_S))

    other = threading.Thread(target=send_and_receive)
    sending = threading.Thread(target=ours.send, args=(LinkMessage.BATCH, batch))
    for thread in (other, sending):
        thread.start()
    assert [ours.receive_one(LinkMessage.ANSWER, GENEROUS_S) for _ in answers] == answers
    for thread in (other, sending):
        thread.join(GENEROUS_S)
    assert received == [batch]


@pytest.mark.parametrize("who", ["scheduler", "of another authority", "nobody"])
def test_who_is_no_executor_is_not_let_in(meetings, authority, tmp_path, who):
    executor = authority.mount(tmp_path / "executor", "paceline://executor")
    other = {
        "scheduler": lambda: authority.mount(tmp_path / "other", "paceline://scheduler"),
        "of another authority": lambda: Authority().mount(tmp_path / "other", "paceline://executor"),
        "nobody": lambda: None,
    }[who]()
    tls = [] if other is None else ["--tls-dir", str(other)]
    meeting = meetings.meeting("--tls-dir", str(executor), count=2, patience_s=0.01)
    with pytest.raises(RankError):
        meetings.joined(meeting, 1, *tls, count=2)
    with pytest.raises(RankError, match="node 1 has not come"):
        meeting.links()


def test_a_node_asks_who_node_0_is(meetings, authority, tmp_path):
    scheduler, executor = (authority.mount(tmp_path / role, f"paceline://{role}") for role in ("scheduler", "executor"))
    meeting = meetings.meeting("--tls-dir", str(scheduler), count=2)
    with pytest.raises(RankError, match="by its certificate the peer is no executor"):
        meetings.joined(meeting, 1, "--tls-dir", str(executor), count=2)


@pytest.fixture
def pair():
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = Link(socket.create_connection(listener.getsockname()), to_node_0=True)
        ours = Link(listener.accept()[0], to_node_0=False)
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture
def lost():
    return []


@pytest.fixture
def group(pair, lost):
    """Of rank 0, whose only other rank is on node 1."""
    group = RankGroup(Order((), "", "cpu", Share(2, 0, 2), ("127.0.0.1", 1)), lost.append, {1: pair[0]})
    yield group
    group.close()


ANSWER = {"identity": {"device": "cpu"}, "num_blocks": 5}


def test_another_node_is_told_and_heard_as_a_rank_of_this_one_is(group, pair):
    theirs = pair[1]
    assert json.loads(theirs.receive_one(LinkMessage.ORDER, GENEROUS_S)) == ["cpu", ["127.0.0.1", 1]]
    theirs.send(LinkMessage.ANSWER, json.dumps([1, ANSWER]).encode())
    assert group.agree({"device": "cpu"}, 8) == 5
    theirs.send(LinkMessage.POSTS, np.array([NUM_POSTS + 3, 42], "<i8").tobytes())
    group.memory.post_wake.wait_until(lambda: group.memory.posts[1, 3].tolist() == [NUM_POSTS + 4, 42])


def test_another_node_that_is_to_stop_is_heard(pair, lost):
    heard = threading.Event()
    order = Order((), "", "cpu", Share(2, 0, 2), ("127.0.0.1", 1))
    with closing(RankGroup(order, lost.append, {1: pair[0]}, on_leaving=heard.set)):
        pair[1].send(LinkMessage.LEAVING)
        assert heard.wait(GENEROUS_S)
    assert lost == []


def test_another_device_of_another_node_is_named(group, pair):
    pair[1].send(LinkMessage.ANSWER, json.dumps([1, ANSWER]).encode())
    with pytest.raises(RankError, match="rank 1 on node 1 has another device than rank 0"):
        group.agree({"device": "a GPU"}, 8)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (LinkMessage.ANSWER, b"{"),
        (LinkMessage.ANSWER, b"3"),
        (LinkMessage.ANSWER, b"[" * 10_000),
        (LinkMessage.ANSWER, json.dumps([0, ANSWER]).encode()),
        (LinkMessage.ANSWER, json.dumps([1, {"num_blocks": 5}]).encode()),
        (LinkMessage.ANSWER, json.dumps([1, ANSWER | {"num_blocks": "many"}]).encode()),
        (LinkMessage.POSTS, bytes(8)),
        (LinkMessage.POSTS, np.array([-1, 0], "<i8").tobytes()),
    ],
)
def test_what_is_no_word_of_a_node_ends_all(group, pair, lost, kind, body):
    pair[1].send(kind, body)
    with pytest.raises(RankError, match=r"another node sent what .*: give all nodes one version"):
        group.until_ready()
    assert len(lost) == 1


def test_a_node_that_fails_says_why(group, pair, lost):
    pair[1].send(LinkMessage.ANSWER, b'{"error": "rank 1 on node 1 was ended by signal 9, so all ranks end"}')
    pair[1].close()
    with pytest.raises(RankError, match="rank 1 on node 1 was ended by signal 9"):
        group.until_ready()
    assert len(lost) == 1


def test_a_node_that_is_silent_is_lost(pair, lost, monkeypatch):
    monkeypatch.setattr(group_module, "_LOOK_S", 0.001)
    group = RankGroup(Order((), "", "cpu", Share(2, 0, 2), ("127.0.0.1", 1)), lost.append, {1: pair[0]})
    group.has_warmed_up()
    with pytest.raises(RankError, match="node 1 stands still, so all ranks end"):
        group.until_ready()
    group.close()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--node", "2/2@a:1"], "'2/2@a:1' is no node; write it like 1/2@10.0.0.1:7070, numbers from 0 on"),
        (["--node", "1@a:1"], "is no node"),
        (["--node", "1/2@a"], "is no node"),
        (["--node", "1/2@a:65536"], "is no node"),
        (["--node", "1/2@127.0.0.1:1"], "--tensor-parallel-size 1 cannot be cut evenly over 2 nodes"),
        (
            ["--node", "1/2@10.0.0.1:1", "--tensor-parallel-size", "2", "--insecure"],
            "other nodes do not reach 127.0.0.1: give --host an address of node 0's",
        ),
        (
            ["--node", "1/2@node-0:1", "--tensor-parallel-size", "2", "--host", "10.0.0.1"],
            "give --tls-dir, or --insecure",
        ),
    ],
)
def test_a_node_that_cannot_be_is_refused(options, why, capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse_config(options)
    assert exit_info.value.code == 2
    assert why in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_nodes_have_their_ranks_in_order():
    config = parse_config(["--tensor-parallel-size", "6", "--node", "1/3@[::1]:7070"])
    assert (config.node.host, config.node.address) == ("::1", "[::1]:7070")
    assert (config.share.ranks, config.share.followers) == (range(2, 4), range(2, 4))
    assert Share(6, 0, 3).followers == range(1, 2)
    assert (Share(6, 0, 3).name_of(5), Share(6).name_of(5)) == ("rank 5 on node 2", "rank 5")
    assert parse_config(["--node", "0/1@127.0.0.1:7070"]).node is None
