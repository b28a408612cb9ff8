"""Which drafter an executor has: what --speculation takes and refuses, and what a model that drafts takes of memory."""

import json
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from drafting.serving import serve
from executor_rig.plans import placement
from paceline.process.command import ExitCode
from paceline_executor import errors
from paceline_executor.__main__ import _code_of
from paceline_executor.config import DrafterKind, SpeculationChoice, parse_config
from paceline_executor.numerics import FLOAT32_NUMERICS
from paceline_executor.start.loading import load
from paceline_executor.start.runner_choice import choose_runner
from paceline_executor.start.sizing import DrafterNeeds, limits_for
from random_models import (
    TINY_CONFIG,
    RandomCheckpoint,
    byte_level_metadata,
    gguf_parts,
    llama_fields,
)
from random_models.eagle3 import Dialect, random_head

WIDE_CONFIG = replace(TINY_CONFIG, head_dim=32)  # of sizes that can be packed
DEEP_CONFIG = replace(WIDE_CONFIG, num_layers=4)
SMALL_CONFIG = replace(WIDE_CONFIG, num_layers=1, max_model_len=128)
# Keys and values, of 2 KV heads of 32 dimensions: in float32, and in int8 with a scale for each slot.
FLOAT32_LAYER_BYTES = 16 * 2 * 2 * 32 * 4
INT8_LAYER_BYTES = 16 * 2 * 2 * (32 + 4)
MIB = 2**20


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target, a smaller model of the same vocabulary, and one of another."""
    folder = tmp_path_factory.mktemp("models")
    paths = {}
    configs = {"target": WIDE_CONFIG, "small": SMALL_CONFIG, "other": SMALL_CONFIG, "deep": DEEP_CONFIG}
    for name, config in configs.items():
        parts = gguf_parts(RandomCheckpoint(config))
        if name == "other":
            parts.metadata |= byte_level_metadata(merges=("l l", "Ġ t", "Ġt ll"))
        paths[name] = str(parts.write(folder / f"{name}.gguf"))
    odd = gguf_parts(RandomCheckpoint(TINY_CONFIG)).write(folder / "odd.gguf")
    return paths | {"odd": str(odd)}


ON_DEVICE = ("--runner", "twin", "--block-size", "16", "--max-num-batched-tokens", "64", "--max-model-len", "64")
ROUNDED = (*ON_DEVICE, "--kv-cache-memory", "512KiB")


def loaded(model, speculation, *options):
    """What an executor with these options serves, computed by one thread: more would wait for each other."""
    common = ["--model", model, "--max-num-seqs", "2", "--kv-cache-memory", "192KiB", "--runner", "cpu"]
    common += ["--num-threads", "1", "--speculation", json.dumps(speculation)]
    return load(parse_config([*common, *options]))


def assert_drafts_change_no_token(engine, min_verified=100):
    """Four drafts a step, beside none; returns how many were verified and right."""
    row_of = lambda row: placement(row, range(5, 15), max_tokens=40)  # noqa: E731
    drafted, steps = serve(engine, [row_of(0)], lambda _, step: 4 if step else 0)
    plain, _ = serve(engine, [row_of(1)])
    assert drafted == plain
    num_verified = sum(step.verified for step in steps)
    assert num_verified >= min_verified
    return num_verified, sum(step.accepted for step in steps)


def assert_drafter_starts(events, drafting, kind, path, bytes_per_block):
    """It is logged, and a block holds what both models keep in it."""
    assert {"event": "drafter", "kind": kind, "path": path, "log_level": "info"} in events
    assert drafting.description.kv_geometry().bytes_per_block == bytes_per_block


@pytest.mark.parametrize(
    ("options", "layer_bytes"), [((), INT8_LAYER_BYTES), (ON_DEVICE, FLOAT32_LAYER_BYTES)], ids=["cpu", "device"]
)
def test_a_smaller_model_drafts(models, options, layer_bytes):
    with capture_logs() as events:
        drafting = loaded(models["target"], {"drafter": "draft_model", "model": models["small"]}, *options)
    bytes_per_block = (WIDE_CONFIG.num_layers + SMALL_CONFIG.num_layers) * layer_bytes
    assert_drafter_starts(events, drafting, "draft_model", models["small"], bytes_per_block)
    num_asked_for = 2 * 64 // 16 if options else 192 * 1024 // bytes_per_block
    assert drafting.description.limits.num_blocks == min(num_asked_for, 192 * 1024 // bytes_per_block)
    assert_drafts_change_no_token(drafting.engine)


@pytest.mark.parametrize(
    ("options", "layer_bytes"),
    [
        (("--quantization", "none"), FLOAT32_LAYER_BYTES + INT8_LAYER_BYTES),
        # In float32 with the numbers that float8 holds.
        (ROUNDED, 2 * FLOAT32_LAYER_BYTES),
    ],
    ids=["packed on a cpu", "rounded on a device"],
)
def test_a_copy_of_the_model_drafts_and_is_right_most_of_the_time(models, options, layer_bytes):
    with capture_logs() as events:
        drafting = loaded(models["target"], {"drafter": "target_copy"}, *options)
    assert_drafter_starts(events, drafting, "target_copy", models["target"], WIDE_CONFIG.num_layers * layer_bytes)
    num_verified, num_accepted = assert_drafts_change_no_token(drafting.engine, min_verified=20)
    assert num_verified / 2 < num_accepted
    assert num_accepted < num_verified or options != ROUNDED  # rounding to float8 errs


@pytest.mark.parametrize(
    ("dialect", "options"),
    [
        (Dialect.AUTHORS, ("--quantization", "auto")),
        (Dialect.SPECULATORS, ("--quantization", "none")),
        (Dialect.AUTHORS, ON_DEVICE),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (Dialect.SPECULATORS, ("--quantization", "auto")),
                (Dialect.AUTHORS, ("--quantization", "none")),
                (Dialect.SPECULATORS, ON_DEVICE),
            ]
        ),
    ],
    ids=lambda value: value if isinstance(value, Dialect) else value[1],
)
def test_a_head_drafts_from_what_the_model_computes(models, tmp_path, dialect, options):
    head = random_head(WIDE_CONFIG, aux_layers=(3, 2), draft_vocab_size=100).write(tmp_path / "head", dialect)
    speculation = {"drafter": "eagle3", "model": str(head)}
    with capture_logs() as events:
        drafting = loaded(models["deep"], speculation, *options, "--kv-cache-memory", "1MiB")
    layer_bytes = INT8_LAYER_BYTES if "auto" in options else FLOAT32_LAYER_BYTES
    head_bytes = 16 * 4 * (2 * 2 * 32 + 64)  # of each token keys, values and a feature
    assert_drafter_starts(events, drafting, "eagle3", str(head), 4 * layer_bytes + head_bytes)
    assert_drafts_change_no_token(drafting.engine)


@pytest.mark.parametrize(
    ("drafter", "model", "options"),
    [
        ("prompt_lookup", None, ("--quantization", "none")),
        ("target_copy", None, ("--quantization", "none")),
        ("draft_model", "small", ()),
        ("eagle3", "head", ()),
    ],
)
def test_what_drafts_is_compiled_before_it_serves(models, tmp_path, compiled_code, drafter, model, options):
    """Else the first requests would wait for a compiler."""
    head = random_head(DEEP_CONFIG, aux_layers=(3, 2), draft_vocab_size=100).write(tmp_path / "head")
    speculation = {"drafter": drafter} | ({} if model is None else {"model": (models | {"head": str(head)})[model]})

    def serving():
        return loaded(models["deep"], speculation, *options, "--kv-cache-memory", "1MiB").engine

    assert_drafts_change_no_token(serving(), min_verified=1)  # all is imported then
    compiled_code.forget()
    engine = serving()
    before = compiled_code.signatures
    assert_drafts_change_no_token(engine, min_verified=1)
    assert compiled_code.signatures == before


def test_a_head_drafts_for_dummy_weights_on_a_device(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(llama_fields(DEEP_CONFIG)))
    head = random_head(DEEP_CONFIG, aux_layers=(3, 2)).write(tmp_path / "head")
    dummy = ["--load-format", "dummy", "--kv-cache-memory", "1MiB"]
    drafting = loaded(str(tmp_path), {"drafter": "eagle3", "model": str(head)}, *ON_DEVICE, *dummy)
    assert drafting.description.has_dummy_weights
    assert_drafts_change_no_token(drafting.engine, min_verified=50)


def test_a_head_of_another_model_is_refused(models, tmp_path):
    head = random_head(replace(WIDE_CONFIG, vocab_size=300), aux_layers=(3, 2)).write(tmp_path / "head")
    with pytest.raises(
        errors.UnsupportedModelError, match="vocab_size is 300, and that of the model is 272; choose one"
    ):
        loaded(models["deep"], {"drafter": "eagle3", "model": str(head)})


def test_blocks_and_weights_of_both_models_fit_into_memory():
    """A drafter costs blocks, and memory that is left for them."""
    config = parse_config(["--max-num-seqs", "2000", "--kv-cache-memory", "1MiB"])
    block_bytes = 16 * FLOAT32_NUMERICS.bytes_per_token(TINY_CONFIG)
    needs = DrafterNeeds(weight_bytes=10 * MIB, bytes_per_token=block_bytes // 16)
    assert limits_for(config, TINY_CONFIG, FLOAT32_NUMERICS, 100 * MIB).num_blocks == MIB // block_bytes
    assert limits_for(config, TINY_CONFIG, FLOAT32_NUMERICS, 100 * MIB, needs).num_blocks == MIB // block_bytes // 2
    with pytest.raises(errors.ShortMemoryError, match="10 MiB of weights"):
        limits_for(config, TINY_CONFIG, FLOAT32_NUMERICS, 11 * MIB, needs)


def test_a_model_of_another_vocabulary_is_refused(models):
    with pytest.raises(
        errors.DrafterError, match=r"token 259 is 'll' in one and 'he' in the other.* of the same family"
    ) as info:
        loaded(models["target"], {"drafter": "draft_model", "model": models["other"]})
    assert _code_of(info.value) is ExitCode.USAGE


def test_a_copy_that_would_be_no_smaller_is_refused(models):
    """Of a packed target, and of one that cannot be packed."""
    with pytest.raises(
        errors.DrafterError, match="target_copy is for --quantization none, and this model is packed: name"
    ):
        loaded(models["target"], {"drafter": "target_copy"})
    with pytest.raises(errors.DrafterError, match="32 does not divide the sizes of this model's layers"):
        loaded(models["odd"], {"drafter": "target_copy"})


def test_a_draft_model_that_is_not_there_is_an_error_of_the_model(models):
    with pytest.raises(errors.ModelNotFoundError):
        loaded(models["target"], {"drafter": "draft_model", "model": "/nowhere.gguf"})


def test_models_draft_where_there_is_a_runner_for_them():
    config = parse_config(["--runner", "simulated", "--speculation", '{"drafter": "target_copy"}'])
    with pytest.raises(errors.LimitError, match="target_copy is for --runner cpu, and this is simulated: leave it out"):
        choose_runner(config)


@pytest.mark.parametrize(
    ("value", "choice"),
    [
        ({"drafter": "prompt_lookup"}, SpeculationChoice()),
        ({"drafter": "target_copy"}, SpeculationChoice(DrafterKind.TARGET_COPY)),
        ({"drafter": "draft_model", "model": "a/b"}, SpeculationChoice(DrafterKind.DRAFT_MODEL, "a/b")),
        ({"drafter": "eagle3", "model": "a/b"}, SpeculationChoice(DrafterKind.EAGLE3, "a/b")),
    ],
)
def test_the_option_is_json_or_a_file_with_it(value, choice, tmp_path):
    path = tmp_path / "speculation.json"
    path.write_text(json.dumps(value))
    assert parse_config(["--speculation", json.dumps(value)]).speculation == choice
    assert parse_config(["--speculation", str(path)]).speculation == choice
    assert parse_config([]).speculation == SpeculationChoice()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("nowhere.json", "cannot read nowhere.json"),
        ("{", "write JSON such as"),
        ('{"drafters": 1}', "it has fields drafter and model alone"),
        ('{"model": "a"}', "'None' is not one of prompt_lookup, draft_model, target_copy, eagle3"),
        ('{"drafter": "draft_model"}', "draft_model needs a model"),
        ('{"drafter": "eagle3"}', "eagle3 needs a model"),
        ('{"drafter": "draft_model", "model": 7}', "draft_model needs a model"),
        ('{"drafter": "target_copy", "model": "a"}', "target_copy has no model of its own: leave model out"),
    ],
)
def test_what_the_option_does_not_take_is_explained(text, sentence, capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse_config(["--speculation", text])
    assert exit_info.value.code == ExitCode.USAGE
    assert sentence in " ".join(capsys.readouterr().err.split())
