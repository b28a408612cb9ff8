"""A service of a mixture of experts: what it takes, what it is told it is, and where it is refused."""

import json

import pytest
from structlog.testing import capture_logs

from paceline_executor.config import parse_config
from paceline_executor.errors import LimitError, ShortMemoryError
from paceline_executor.numerics import FLOAT32_NUMERICS, KvDtype, MatrixKind, Numerics
from paceline_executor.runner.device.memory_plan import activation_bytes
from paceline_executor.start.loading import load
from paceline_executor.start.opening import NoProgress, open_model
from paceline_executor.start.sizing import limits_for
from paceline_executor.weights.hf.config import read_hf_config
from paceline_executor.weights.stored_tensor import FloatType

GIB = 2**30
TINY = {"model_type": "qwen3_moe", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
TINY |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4}
TINY |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "max_position_embeddings": 512}
MIXTRAL_8X7B = {"model_type": "mixtral", "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336}
MIXTRAL_8X7B |= {"num_hidden_layers": 32, "num_attention_heads": 32}
QWEN3_30B = {"model_type": "qwen3_moe", "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144}
QWEN3_30B |= {"num_hidden_layers": 48, "num_attention_heads": 32, "head_dim": 128}


def parsed(folder, fields, *arguments):
    """Of random weights of this shape."""
    (folder / "config.json").write_text(json.dumps(fields))
    small = ["--max-num-seqs", "2", "--kv-cache-memory", "64MiB", "--num-threads", "1"]
    return parse_config(["--model", str(folder), "--load-format", "dummy", *small, *arguments])


def config_of(folder, fields):
    (folder / "config.json").write_text(json.dumps(fields))
    return read_hf_config(folder / "config.json")


@pytest.mark.parametrize(
    "arguments", [[], ["--quantization", "none"], ["--runner", "twin"]], ids=["packed", "float32", "twin"]
)
def test_an_executor_serves_random_experts(tmp_path, arguments):
    description = load(parsed(tmp_path, TINY, *arguments)).description
    model = description.served_model()
    assert (model.architecture, model.has_dummy_weights) == ("qwen3moe", True)
    of_layer = 4 * 64 + 4 * 3 * 32 * 64 + (2 * 128 + 2 * 64) * 64 + 2 * 64 + 2 * 32
    assert description.num_parameters == 2 * of_layer + 2 * 300 * 64 + 64


def test_ranks_that_cannot_share_a_mixture_are_refused_by_name(tmp_path):
    message = "--tensor-parallel-size 3: 4 attention heads and 2 KV heads, 4 experts: 2, 4 are possible"
    with pytest.raises(LimitError, match=message):
        load(parsed(tmp_path, TINY, "--quantization", "none", "--tensor-parallel-size", "3"))


def test_what_each_of_several_ranks_has_is_logged(tmp_path):
    with capture_logs() as events:
        open_model(parsed(tmp_path, TINY, "--tensor-parallel-size", "2"), NoProgress())
    assert {"event": "experts_shared", "each_rank_has": "some experts", "log_level": "info"} in events


@pytest.mark.parametrize(
    ("fields", "num_parameters"),
    [
        # Four matrices of attention, a router and experts; the embedding and the output.
        (MIXTRAL_8X7B, 32 * (2 * 4096 * (4096 + 1024) + 8 * 4096 + 8 * 3 * 14_336 * 4096) + 2 * 32_000 * 4096),
        (QWEN3_30B, 48 * (2 * 2048 * (4096 + 512) + 128 * 2048 + 128 * 3 * 768 * 2048) + 2 * 151_936 * 2048),
    ],
    ids=["Mixtral 8x7B", "Qwen3-30B-A3B"],
)
def test_all_experts_take_memory(tmp_path, fields, num_parameters):
    """Whether a token goes through them or not; to one in a thousand, which norms and scales are."""
    model = config_of(tmp_path, fields)
    assert model.num_parameters() == pytest.approx(num_parameters, rel=1e-3)
    bfloat16, float8 = (
        Numerics(kind, KvDtype.BFLOAT16, FloatType.BFLOAT16) for kind in (MatrixKind.DENSE, MatrixKind.FLOAT8)
    )
    assert bfloat16.weight_bytes(model, {}) == pytest.approx(2 * num_parameters, rel=1e-3)
    embedding = fields["vocab_size"] * fields["hidden_size"]
    assert float8.weight_bytes(model, {}) == pytest.approx(num_parameters + embedding, rel=1e-2)
    with pytest.raises(
        ShortMemoryError, match="of weights do not fit into 65,536 MiB of free memory; take a smaller model"
    ):
        limits_for(parsed(tmp_path, fields), model, FLOAT32_NUMERICS, 64 * GIB)
    assert limits_for(parsed(tmp_path, fields), model, FLOAT32_NUMERICS, 200 * GIB).num_blocks > 0


def test_a_step_holds_what_all_of_a_tokens_experts_make(tmp_path):
    """Of 8 slots what passes the gates, each slice of the product, and 16 bytes; dense layers would take 3 x 6144."""
    model = config_of(tmp_path, QWEN3_30B)
    for slices in (1, 8):
        slots = 8 * (768 + slices * 2048 + 8)
        tokens = activation_bytes(model, 2048, 1, 2, slices) - activation_bytes(model, 1024, 1, 2, slices)
        assert tokens == pytest.approx(1024 * 2 * (slots + 5 * 2048 + 2 * 128 + 6144 / 2) * 9 / 8, rel=1e-3)
