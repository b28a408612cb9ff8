"""The sums before a model is loaded: memory, blocks, the length of a row, and what is logged meanwhile."""

from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from paceline_executor.config import parse_config
from paceline_executor.errors import LimitError, ShortMemoryError
from paceline_executor.memory import available_bytes
from paceline_executor.numerics import FLOAT32_NUMERICS, KvDtype, MatrixKind, Numerics
from paceline_executor.start.opening import ProgressLog, served_name
from paceline_executor.start.sizing import limits_for
from paceline_executor.weights import FetchPhase, FetchProgress
from random_models import TINY_CONFIG

MIB = 2**20
GIB = 2**30
# 2 layers of 2 KV heads of 16 dimensions, K and V in float32: 512 bytes per token, 8 KiB per block of 16.
BLOCK_BYTES = 8192


@pytest.fixture
def config():
    """Everything as it comes, but few rows."""
    return parse_config(["--max-num-seqs", "100"])


def test_a_quarter_of_what_the_weights_leave_free_goes_to_the_kv_cache(config):
    free_bytes = TINY_CONFIG.num_parameters() * 4 + 40 * MIB

    assert (
        limits_for(replace(config, max_num_seqs=4096), TINY_CONFIG, FLOAT32_NUMERICS, free_bytes).num_blocks
        == 10 * MIB // BLOCK_BYTES
    )


@pytest.mark.parametrize(
    ("kv", "block_bytes"), [(KvDtype.FLOAT16, BLOCK_BYTES // 2), (KvDtype.INT8, 16 * 2 * 2 * 2 * (16 + 4))]
)
def test_smaller_numbers_leave_room_for_more_blocks(config, kv, block_bytes):
    """A packed weight is counted as a byte and a 32nd of a float16, norms are float32; an int8 slot has a scale of four
    bytes.
    """
    num_in_norms = sum(shape[0] for shape in TINY_CONFIG.tensor_shapes().values() if len(shape) == 1)
    free_bytes = (TINY_CONFIG.num_parameters() - num_in_norms) * 34 // 32 + num_in_norms * 4 + 40 * MIB
    wide = replace(config, max_num_seqs=4096)
    limits = limits_for(wide, TINY_CONFIG, Numerics(MatrixKind.PACKED, kv), free_bytes)

    assert limits.num_blocks == 10 * MIB // block_bytes


def test_packed_weights_fit_where_float32_does_not(config):
    asked = replace(config, kv_cache_memory=MIB)
    free_bytes = MIB + TINY_CONFIG.num_parameters() * 4 // 3
    with pytest.raises(ShortMemoryError, match="do not fit"):
        limits_for(asked, TINY_CONFIG, FLOAT32_NUMERICS, free_bytes)
    packed = Numerics(MatrixKind.PACKED, KvDtype.FLOAT16)

    assert limits_for(asked, TINY_CONFIG, packed, free_bytes).num_blocks == MIB // (BLOCK_BYTES // 2)


def test_the_kv_cache_takes_at_most_two_gib_unasked(config):
    model = replace(TINY_CONFIG, max_model_len=2**20)

    assert limits_for(config, model, FLOAT32_NUMERICS, 100 * GIB).num_blocks == 2 * GIB // BLOCK_BYTES


def test_the_kv_cache_takes_what_is_asked_for(config):
    limits = limits_for(replace(config, kv_cache_memory=MIB + 1), TINY_CONFIG, FLOAT32_NUMERICS, GIB)

    assert (limits.num_blocks, limits.block_size) == (MIB // BLOCK_BYTES, 16)


def test_more_blocks_than_all_rows_can_fill_are_not_allocated(config):
    """Three rows of 256 tokens fill 48 blocks."""
    assert limits_for(replace(config, max_num_seqs=3), TINY_CONFIG, FLOAT32_NUMERICS, 100 * GIB).num_blocks == 48


def test_a_row_is_no_longer_than_the_pool(config):
    """A request longer than that could never run."""
    limits = limits_for(replace(config, kv_cache_memory=9 * BLOCK_BYTES), TINY_CONFIG, FLOAT32_NUMERICS, GIB)

    assert limits.max_model_len == 9 * 16


def test_a_length_that_was_asked_for_is_not_lowered_in_silence(config):
    """It says what to do instead."""
    asked = replace(config, kv_cache_memory=9 * BLOCK_BYTES, max_model_len=9 * 16 + 1)
    with pytest.raises(ShortMemoryError, match=r"--max-model-len 145 .* 144 tokens .* raise --kv-cache-memory"):
        limits_for(asked, TINY_CONFIG, FLOAT32_NUMERICS, GIB)


def test_a_row_is_as_long_as_asked_for(config):
    assert limits_for(replace(config, max_model_len=77), TINY_CONFIG, FLOAT32_NUMERICS, GIB).max_model_len == 77
    assert limits_for(replace(config, max_model_len=256), TINY_CONFIG, FLOAT32_NUMERICS, GIB).max_model_len == 256
    with pytest.raises(LimitError, match=r"--max-model-len 257 .* 256"):
        limits_for(replace(config, max_model_len=257), TINY_CONFIG, FLOAT32_NUMERICS, GIB)


@pytest.mark.parametrize(("kv_bytes", "free_bytes"), [(GIB, GIB), (None, 100_000), (7 * BLOCK_BYTES, GIB), (1, GIB)])
def test_too_little_memory_is_an_error_that_says_what_to_do(config, kv_bytes, free_bytes):
    """Too little for the cache asked for, for the weights, for one conversation, for one block."""
    advice = "--kv-cache-memory" if free_bytes == GIB else "take a smaller model, or free memory"
    with pytest.raises(ShortMemoryError, match=advice):
        limits_for(replace(config, kv_cache_memory=kv_bytes), TINY_CONFIG, FLOAT32_NUMERICS, free_bytes)


def test_a_tied_embedding_counts_once():
    untied = replace(TINY_CONFIG, tie_word_embeddings=False).num_parameters()

    assert untied - TINY_CONFIG.num_parameters() == TINY_CONFIG.vocab_size * TINY_CONFIG.hidden_size


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ([], "smollm2-135m-instruct"),
        (["--model", "dir/My-Model.gguf"], "My-Model"),
        (["--model", "dir/My-Model.gguf", "--served-model-name", "mine"], "mine"),
    ],
)
def test_requests_call_the_model_by_its_name(arguments, name):
    config = parse_config(arguments)

    assert served_name(config, Path(config.model)) == name


@pytest.mark.parametrize("option", ["--model", "--revision", "--cache-dir"])
def test_an_option_that_is_empty_is_refused_and_means_no_default(option, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse_config([option, ""])
    assert f"{option}: is empty" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["two\nlines", "x" * 257, "red\x1b[31m"])
def test_a_name_that_nobody_could_ask_for_is_refused(name, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse_config(["--served-model-name", name])
    assert "--served-model-name: a name has 1 to 256 bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1GiB", GIB), ("1.5 gib", 3 * GIB // 2), ("2MB", 2_000_000), ("512mib", 512 * MIB), ("77", 77), ("77b", 77)],
)
def test_sizes_have_units(text, num_bytes):
    assert parse_config(["--kv-cache-memory", text]).kv_cache_memory == num_bytes


def test_the_cache_directory_comes_from_the_environment_unless_given(monkeypatch):
    """The only thing that does."""
    monkeypatch.setenv("PACELINE_CACHE_DIR", "/somewhere")

    assert parse_config([]).cache_dir == Path("/somewhere")
    assert parse_config(["--cache-dir", "/elsewhere"]).cache_dir == Path("/elsewhere")


def test_progress_is_logged_at_most_twice_a_second_but_never_without_its_end():
    now_s = 0.0
    progress = ProgressLog(clock_s=lambda: now_s)
    with capture_logs() as events:
        for part in range(101):
            now_s = part * 0.01
            progress.fetch(FetchProgress(FetchPhase.DOWNLOADING, part, 100))
        progress.log("warm_up", "compile", 0.0)

    fractions = [event["fraction"] for event in events if event["event"] == "model_fetch"]
    assert fractions == [0.0, 0.5, 1.0]
    assert events[-1] == {"event": "warm_up", "phase": "compile", "fraction": 0.0, "log_level": "info"}


@pytest.mark.parametrize(
    ("limit", "current", "expected"),
    [("max", "5", 2048), ("4096", "1024", 2048), ("2500", "1500", 1000), ("1000", "2000", 0), (None, None, 2048)],
)
def test_a_containers_limit_bounds_what_is_available(tmp_path, limit, current, expected):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9 kB\nMemAvailable:       2 kB\n")
    for name, text in (("memory.max", limit), ("memory.current", current)):
        if text is not None:
            (tmp_path / name).write_text(text + "\n")

    assert available_bytes(meminfo, tmp_path) == expected
