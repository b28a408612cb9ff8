"""How a group of ranks begins: one that has opened something else, or nothing, is named before anything is computed."""

from contextlib import contextmanager
from unittest.mock import Mock

import pytest
from structlog.testing import capture_logs

from paceline_executor.errors import RankError
from paceline_executor.ranks.group import RankGroup
from paceline_executor.ranks.order import Order, identity_of
from paceline_executor.share import Share
from paceline_executor.weights import load_checkpoint
from random_models import RandomCheckpoint, gguf_parts


@contextmanager
def group_of(path):
    """Two ranks, and what was lost."""
    lost = []
    group = RankGroup(Order(("--quantization", "none"), str(path), "cpu", Share(2)), lost.append)
    try:
        yield group, lost
    finally:
        group.close()


def test_a_rank_with_another_model_is_named(tmp_path):
    mine, its = (
        gguf_parts(RandomCheckpoint(seed=seed)).write(tmp_path / f"{name}.gguf") for seed, name in enumerate("ab")
    )
    with group_of(its) as (group, lost):
        with pytest.raises(RankError, match="rank 1 has another model than rank 0"):
            group.agree(identity_of(load_checkpoint(mine), "cpu"), 16)
        assert lost == []


def test_there_are_as_many_blocks_as_the_rank_with_the_least_memory_has_room_for():
    opened = [(rank, {"identity": {"device": "a GPU"}, "num_blocks": num}) for rank, num in ((1, 9), (2, 5), (3, 7))]
    group = Mock(spec=RankGroup, _collect=lambda: opened, _order=Mock(share=Share(4)))
    with capture_logs() as logs:
        assert RankGroup.agree(group, {"device": "a GPU"}, 8) == 5
    assert [(event["event"], event["rank"]) for event in logs] == [("least_memory", 2)]
    with pytest.raises(RankError, match="rank 1 has another device than rank 0"):
        RankGroup.agree(group, {"device": "another GPU"}, 8)


def test_a_rank_that_cannot_open_its_model_says_why(tmp_path):
    with group_of(tmp_path / "nowhere.gguf") as (group, lost):
        with pytest.raises(RankError, match=r"rank 1 has failed, so all ranks end: .*nowhere\.gguf"):
            group.agree({}, 16)
        assert len(lost) == 1
