"""How a group of ranks begins: one that has opened something else, or nothing, is named before anything is computed."""

from contextlib import contextmanager

import pytest

from paceline_executor.errors import RankError
from paceline_executor.limits import RowLimits
from paceline_executor.ranks.group import RankGroup
from paceline_executor.ranks.order import Order, identity_of
from paceline_executor.weights import load_checkpoint
from random_models import RandomCheckpoint, gguf_parts


@contextmanager
def group_of(path):
    """Two ranks, and what was lost."""
    lost = []
    group = RankGroup(Order(str(path), False, 2, 1, RowLimits(4, 64, 64, 16, 16, 272), "info"), lost.append)
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
            group.agree(identity_of(load_checkpoint(mine)))
        assert lost == []


def test_a_rank_that_cannot_open_its_model_says_why(tmp_path):
    with group_of(tmp_path / "nowhere.gguf") as (group, lost):
        with pytest.raises(RankError, match=r"rank 1 has failed, so all ranks end: .*nowhere\.gguf"):
            group.agree({})
        assert len(lost) == 1
