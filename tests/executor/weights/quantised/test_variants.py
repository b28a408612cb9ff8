"""Every quantised format is read as its definition says, bit for bit in float32, and served so."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from structlog.testing import capture_logs

from executor_rig.cpu import cpu_runner
from executor_rig.driving import Driver
from paceline_executor.errors import UnsupportedModelError
from paceline_executor.models.layers import DenseLinear, GroupedLinear, ScaledLinear, SeparateLinears
from paceline_executor.models.packed_llama import PackedLlamaModel
from paceline_executor.models.packed_matrix import read_packed
from paceline_executor.models.shapes import ShapeWeights
from paceline_executor.models.uploaded import UploadedWeights
from paceline_executor.numerics import KvDtype, MatrixKind, Numerics
from paceline_executor.upload.grouping import expected_weight, grouped_weight
from paceline_executor.upload.matrices import Uploader
from paceline_executor.upload.staging import HostTransfer, Staging
from paceline_executor.weights import load_checkpoint
from paceline_executor.weights.grouped_rows import GroupedRows, GroupedTensor, StoredCodes
from paceline_executor.weights.stored_tensor import FloatType, GroupedType
from paceline_kernels.grouped_linear import GroupedWeight, unpack_grouped
from paceline_kernels.linear import Splits
from paceline_kernels.quantized_linear import WeightFormat, unpack_rows
from quantised_files import CONFIG, VARIANTS, written
from random_models import llama_fields

EACH = pytest.mark.parametrize("name", VARIANTS)
QKV = tuple(f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv")
DOWN = "model.layers.0.mlp.down_proj.weight"


def loaded(folder, name):
    """(checkpoint, the weights that its tensors stand for)."""
    files = written(VARIANTS[name])
    return load_checkpoint(files.save(folder)), files.weights


@EACH
def test_weights_are_what_the_format_defines(tmp_path, name):
    checkpoint, weights = loaded(tmp_path, name)
    for tensor, expected in weights.items():
        assert np.array_equal(checkpoint.tensor(tensor), expected), tensor


@EACH
def test_a_device_gets_the_same_bits(tmp_path, name):
    """In float32; in 16 bits rounded once."""
    checkpoint, weights = loaded(tmp_path, name)
    with Staging(HostTransfer(), 1 << 16) as staging:
        exact = Uploader(checkpoint, torch.device("cpu"), torch.float32, staging)
        half = Uploader(checkpoint, torch.device("cpu"), torch.bfloat16, staging)
        for tensor, expected in weights.items():
            assert np.array_equal(exact.dense(tensor).numpy(), expected), tensor
        fused = torch.from_numpy(np.concatenate([weights[part] for part in QKV]))
        assert torch.equal(half.matrix(*QKV, kind=MatrixKind.DENSE), fused.bfloat16())
        exact.check()
        half.check()


FORMATS = {
    "gptq": "gptq-int4",
    "gptq 8 bits": "gptq-int8",
    "awq gemv": "awq-int4",
    "w4a16 asym": "compressed-tensors-int4",
    "w8a8": "compressed-tensors-int8",
    "nvfp4": "compressed-tensors-nvfp4",
    "modelopt nvfp4": "modelopt-nvfp4",
    "ct float8 rows": "float8_e4m3fn",
    "fp8 blocks": "float8_e4m3fn-blocks",
    "nf4 nested": "bitsandbytes-nf4",
    "LLM.int8": "bitsandbytes-int8",
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_says_its_format_and_bits(tmp_path, name):
    assert loaded(tmp_path, name)[0].quantization == FORMATS[name]


INT4, ZEROS, INT8 = WeightFormat.INT4, WeightFormat.INT4_ZEROS, WeightFormat.INT8
PACKED = {
    "gptq": INT4,
    "gptq asym": ZEROS,
    "gptq g64, last group cut off": INT4,
    "gptq whole rows": INT4,
    "gptq act order": INT4,
    "gptq asym act order g64": ZEROS,
    "gptq 8 bits": INT8,
    "awq": ZEROS,
    "awq bfloat16 scales": ZEROS,
    "w4a16": INT4,
    "w4a16 channel": INT4,
    "w4a16 asym": ZEROS,
    "w4a16 asym act order": ZEROS,
    "w8a16 channel": INT8,
    "w8a8": INT8,
    "w4a8, a byte each": INT8,
}


@pytest.mark.parametrize("name", PACKED)
def test_codes_scales_and_zeros_are_packed_without_rounding(tmp_path, name):
    checkpoint, weights = loaded(tmp_path, name)
    packed = read_packed(checkpoint, (DOWN,))
    found = unpack_rows(packed.weight, torch.arange(packed.weight.num_outputs, dtype=torch.int32)).numpy()
    assert (packed.weight.format, packed.in_8_bits) == (PACKED[name], ())
    assert np.array_equal(found, weights[DOWN] if packed.order is None else weights[DOWN][:, packed.order])


def with_a_scale(folder, name, end, scale):
    """The variant, one of whose scales is large."""
    files = written(VARIANTS[name])
    files.tensors[DOWN.replace("weight", end)].view(-1)[0] = scale
    return load_checkpoint(files.save(folder))


def test_minima_beyond_16_bits_are_kept_as_zeros(tmp_path):
    checkpoint = with_a_scale(tmp_path, "gptq", "scales", 30_000)
    weight = read_packed(checkpoint, (DOWN,)).weight
    assert weight.format is ZEROS
    found = unpack_rows(weight, torch.arange(weight.num_outputs, dtype=torch.int32)).numpy()
    assert np.array_equal(found, checkpoint.tensor(DOWN))


@pytest.mark.parametrize(
    ("name", "end"), [("w8a8", "weight_scale"), ("nf4", "weight.absmax"), ("w4a16", "weight_scale")]
)
def test_weights_beyond_what_8_bits_hold_are_refused_with_the_way_out(tmp_path, name, end):
    checkpoint = with_a_scale(tmp_path, name, end, 1e30)
    with pytest.raises(
        UnsupportedModelError, match=rf"tensor {DOWN} has weights of up to \S+e\+3., .*--quantization none"
    ):
        read_packed(checkpoint, (DOWN,))


def test_a_digest_is_of_one_format_and_one_training(tmp_path):
    """However the files are cut; and no number but the codes need differ."""
    (tmp_path / "trained").mkdir()
    digests = {loaded(tmp_path, name)[0].digest for name in ("gptq", "awq", "w4a16", "nf4")}
    files = written(VARIANTS["gptq"])
    assert load_checkpoint(files.save(tmp_path)).digest in digests
    files.tensors["model.layers.1.mlp.down_proj.qweight"][0, 0] ^= 1
    assert load_checkpoint(files.save(tmp_path / "trained")).digest not in digests
    assert len(digests) == 4


@pytest.mark.parametrize("name", ["gptq", "awq", "w4a16 channel", "w8a8", "nf4"])
def test_memory_is_planned_for_the_bits_that_are_kept(tmp_path, name):
    checkpoint, _ = loaded(tmp_path, name)
    planned = Numerics(MatrixKind.PACKED, KvDtype.INT8).weight_bytes(checkpoint.config, checkpoint.stored_types)
    assert 1 <= planned / PackedLlamaModel(checkpoint, 64).num_bytes < 1.2


@pytest.mark.parametrize("name", ["w8a8 asym", "nvfp4", "modelopt nvfp4", "fp8 blocks", "nf4", "LLM.int8"])
def test_what_products_have_no_form_for_is_rounded_to_8_bits(tmp_path, name):
    """Codes beyond 8 bits, tables, blocks of rows, scales that are multiplied twice."""
    checkpoint, weights = loaded(tmp_path, name)
    packed = read_packed(checkpoint, (DOWN,))
    found = unpack_rows(packed.weight, torch.arange(packed.weight.num_outputs, dtype=torch.int32)).numpy()
    largest = np.abs(weights[DOWN]).reshape(-1, 32).max(axis=1)
    assert packed.in_8_bits == (DOWN,)
    assert (np.abs(found - weights[DOWN]).reshape(-1, 32).max(axis=1) <= largest / 253).all()


def lines(events, name):
    """The log lines of this name, without it and their level."""
    found = [event for event in events if event["event"] == name]
    return [{key: value for key, value in event.items() if key not in ("event", "log_level")} for event in found]


@pytest.mark.parametrize(("name", "matrices"), [("gptq", 0), ("gptq 8 bits", 0), ("w4a16 act order", 10), ("nf4", 14)])
def test_what_does_not_keep_its_bits_on_a_cpu_is_said_once(tmp_path, name, matrices):
    """Matrices with the same inputs whose orders differ do not: no tool writes such, these writers do."""
    checkpoint, _ = loaded(tmp_path, name)
    with capture_logs() as events:
        PackedLlamaModel(checkpoint, 64)
    told = [(line["stored"], line["matrices"]) for line in lines(events, "weights_in_8_bits")]
    assert told == ([(checkpoint.quantization, matrices)] if matrices else [])


def matrices_of(folder, name, dtype=torch.float32):
    """(checkpoint, the weights that stand in its files, what a device has of a matrix by its name)."""
    checkpoint, weights = loaded(folder, name)
    with Staging(HostTransfer(), 1 << 16) as staging:
        uploader = Uploader(checkpoint, torch.device("cpu"), dtype, staging)
        found = {each: uploader.matrix(each, kind=MatrixKind.AS_STORED) for each in weights if "_proj" in each}
        uploader.check()
    return checkpoint, weights, found


@EACH
def test_a_device_keeps_the_bits_of_what_is_quantised_in_groups(tmp_path, name, monkeypatch):
    """In float32 the weights are those of the file; a number that is multiplied twice is off by a rounding.

    The device unpacks codes, but for those of one matrix by which the version of GPTQ zeros is decided.
    """
    shapes, read = [], StoredCodes.read
    monkeypatch.setattr(StoredCodes, "read", lambda codes: [read(codes), shapes.append(codes.shape)][0])
    checkpoint, weights, found = matrices_of(tmp_path, name)
    assert len([shape for shape in shapes if shape in set(map(np.shape, weights.values()))]) <= ("gptq" in name)
    for matrix, parts in found.items():
        if isinstance(checkpoint.stored(matrix), GroupedTensor):
            if name == "w8a8":
                ours = (parts.values.float() * parts.scales[:, None]).numpy()
            else:
                (weight,) = parts
                assert isinstance(weight, GroupedWeight), matrix
                ours = unpack_grouped(weight, torch.float32).numpy()
            np.testing.assert_allclose(ours, weights[matrix], rtol=2e-7 if name == "LLM.int8" else 0)


@EACH
def test_kernels_are_compiled_for_the_weights_that_arrive(tmp_path, name):
    """By types alone, before the file is read; a file may say that zeros or an order are there, and they are not."""
    checkpoint, _, found = matrices_of(tmp_path, name, torch.bfloat16)
    for matrix, parts in found.items():
        stored = checkpoint.stored(matrix)
        if isinstance(stored, GroupedTensor) and name != "w8a8":
            expected = expected_weight(stored.stored, stored.shape, torch.bfloat16, torch.device("meta"))
            kinds = [
                (each.layout, each.words.dtype, each.zeros is None, each.scales.dtype) for each in (expected, *parts)
            ]
            assert kinds[0] == kinds[1], matrix


@pytest.mark.parametrize(
    "change",
    [
        {"zeros": np.full((2, 2), 256, np.float32)},
        {"order": np.array([0] * 33 + [1] * 31)},
        {"table": np.arange(256, dtype=np.float32)},
        {"group": 24},
    ],
)
def test_kernels_have_no_form_for_zeros_beyond_a_byte_uneven_groups_and_other_tables(change):
    rows = GroupedRows(8, np.ones((2, 64), np.uint8), np.ones((2, 2), np.float32), 32)
    kind, codes = GroupedType("of a test", 8), torch.ones(2, 64, dtype=torch.uint8)
    assert grouped_weight(rows, codes, kind, torch.float32) is not None
    assert grouped_weight(replace(rows, **change), codes, kind, torch.float32) is None


def test_a_matrix_that_kernels_have_no_form_for_is_widened_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline_executor.upload.matrices.grouped_weight", lambda *_: None)
    with capture_logs() as events:
        _, weights, found = matrices_of(tmp_path, "gptq")
    assert {line["stored"] for line in lines(events, "weights_widened")} == {"gptq-int4"}
    assert np.array_equal(found[DOWN][0].numpy(), weights[DOWN])


@pytest.mark.parametrize(
    ("name", "version", "decided_by"),
    [
        ("gptq asym", 1, "checkpoint_format"),
        ("gptq asym v2", 2, "checkpoint_format"),
        ("gptq v2 under the key of v1", 2, "weights"),
        ("gptq v1 under the key of v2", 1, "weights"),
    ],
)
def test_which_version_the_zeros_are_of_is_said_once(tmp_path, name, version, decided_by):
    checkpoint, _ = loaded(tmp_path, name)
    with capture_logs() as events:
        for tensor in CONFIG.tensor_shapes():
            checkpoint.tensor(tensor)
    (line,) = lines(events, "gptq_zeros")
    assert (line["version"], line["decided_by"]) == (version, decided_by)


@pytest.mark.parametrize(
    ("name", "has_form", "kind"),
    [
        ("gptq", True, GroupedLinear),
        ("gptq act order", True, SeparateLinears),
        ("ct mixed", True, SeparateLinears),
        ("gptq", False, DenseLinear),
    ],
)
def test_products_are_one_where_scheme_and_order_agree(tmp_path, monkeypatch, name, has_form, kind):
    """Either way the outputs are those of all matrices, side by side, each with its part of the bias."""
    if not has_form:
        monkeypatch.setattr("paceline_executor.upload.matrices.grouped_weight", lambda *_: None)
    checkpoint, weights = loaded(tmp_path, name)
    with Staging(HostTransfer(), 1 << 16) as staging:
        uploader = Uploader(checkpoint, torch.device("cpu"), torch.float32, staging)
        matrix = np.concatenate([weights[part] for part in QKV])
        bias = torch.arange(len(matrix)).float()
        linear = UploadedWeights(uploader, MatrixKind.AS_STORED).linear(QKV, bias)
    x = torch.ones(2, matrix.shape[1])
    assert isinstance(linear, kind)
    expected = x @ torch.from_numpy(matrix).T + bias
    torch.testing.assert_close(linear(x, Splits.EVEN), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["gptq", "awq", "w4a16 channel", "nf4", "mxfp4"])
def test_memory_of_a_device_is_planned_for_the_bits_that_are_kept(tmp_path, name):
    checkpoint, _, found = matrices_of(tmp_path, name)
    types = {each: stored for each, stored in checkpoint.stored_types.items() if each in found}
    as_stored = Numerics(MatrixKind.AS_STORED, KvDtype.BFLOAT16, FloatType.BFLOAT16)
    others = as_stored.weight_bytes(checkpoint.config, {}) - sum(
        2 * np.prod(checkpoint.config.tensor_shapes()[each]) for each in found
    )
    planned = as_stored.weight_bytes(checkpoint.config, types) - others
    taken = sum(part.num_bytes for parts in found.values() for part in parts)
    assert 0.95 <= planned / taken < 1.2
    assert as_stored.widened_bytes(checkpoint.config, types) == 4 * CONFIG.hidden_size * CONFIG.intermediate_size


def w8a8(folder, change=None, **activations):
    """(checkpoint of W8A8 of which this is said otherwise, its weights)"""
    files = written(VARIANTS["w8a8"])
    groups = files.fields["config.json"]["quantization_config"]["config_groups"]
    groups["group_0"]["input_activations"] |= activations
    if change is not None:
        change(files, groups)
    return load_checkpoint(files.save(folder)), files.weights


def with_zeros(files, groups):
    scale = files.tensors[DOWN + "_scale"]
    files.tensors[DOWN.replace("weight", "weight_zero_point")] = torch.zeros_like(scale, dtype=torch.int8)


def beside_w8a16(files, groups):
    groups["group_1"] = {"weights": groups["group_0"]["weights"]}


@pytest.mark.parametrize(
    ("activations", "change", "is_scaled"),
    [
        ({}, None, True),
        ({"dynamic": False}, None, False),
        ({"symmetric": False}, None, False),
        ({"strategy": "tensor"}, None, False),
        ({"num_bits": 4}, None, False),
        ({"type": "float"}, None, False),
        ({}, with_zeros, False),
        ({}, beside_w8a16, False),
    ],
)
def test_int8_inputs_are_taken_where_nothing_but_scales_of_rows_and_tokens_is_asked(
    tmp_path, activations, change, is_scaled
):
    """Else, and where it is not said of which scheme a matrix is, weights are grouped ones."""
    checkpoint, weights = w8a8(tmp_path, change, **activations)
    with Staging(HostTransfer(), 1 << 16) as staging:
        uploader = Uploader(checkpoint, torch.device("cpu"), torch.float32, staging)
        found = UploadedWeights(uploader, MatrixKind.AS_STORED).linear((DOWN,))
        uploader.check()
    as_planned = ShapeWeights(checkpoint.config, torch.float32, MatrixKind.AS_STORED, checkpoint.stored_types).linear(
        (DOWN,)
    )
    assert type(found) is type(as_planned) is (ScaledLinear if is_scaled else GroupedLinear)
    if is_scaled:
        assert found.weight.values.dtype == as_planned.weight.values.dtype == torch.int8
        assert np.array_equal(found.weight.values.float() * found.weight.scales[:, None], weights[DOWN])


def test_w8a8_matrices_of_the_same_inputs_become_one_and_nothing_is_widened(tmp_path):
    checkpoint, weights = w8a8(tmp_path)
    with Staging(HostTransfer(), 1 << 16) as staging:
        uploader = Uploader(checkpoint, torch.device("cpu"), torch.float32, staging)
        found = uploader.matrix(*QKV, kind=MatrixKind.AS_STORED)
        uploader.check()
    whole = np.concatenate([weights[part] for part in QKV])
    assert np.array_equal(found.values.float() * found.scales[:, None], whole)
    planned = Numerics(MatrixKind.AS_STORED, KvDtype.BFLOAT16, FloatType.BFLOAT16)
    types = {part: checkpoint.stored_types[part] for part in QKV}
    fewer = planned.weight_bytes(checkpoint.config, {}) - planned.weight_bytes(checkpoint.config, types)
    assert fewer == whole.size - 4 * len(whole)
    assert planned.widened_bytes(checkpoint.config, checkpoint.stored_types) == 0


def test_progress_counts_the_bytes_of_all_parts(tmp_path):
    checkpoint, _ = loaded(tmp_path, "gptq")
    told = []
    with Staging(HostTransfer(), 1 << 16) as staging:
        uploader = Uploader(checkpoint, torch.device("cpu"), torch.float32, staging, lambda *done: told.append(done))
        for tensor in CONFIG.tensor_shapes():
            uploader.dense(tensor)
    assert told[-1][0] == told[-1][1] == sum(checkpoint.stored(name).num_bytes for name in CONFIG.tensor_shapes())


def test_biases_of_zeros_are_ignored(tmp_path):
    """AutoGPTQ of 2023 wrote one for each matrix."""
    files = written(VARIANTS["gptq"])
    files.tensors[DOWN.replace("weight", "bias")] = torch.zeros(CONFIG.hidden_size)
    assert load_checkpoint(files.save(tmp_path)).config == CONFIG


SERVED = ["gptq asym act order g64", "awq", "ct mixed", "modelopt mixed", "fp8 blocks", "nf4 nested", "LLM.int8"]


@pytest.mark.parametrize(
    "name", [name if name in SERVED else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]
)
def test_greedy_tokens_are_those_of_transformers_with_the_same_weights(tmp_path, name):
    checkpoint, weights = loaded(tmp_path, name)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama_fields(CONFIG))).eval()
    model.load_state_dict({tensor: torch.from_numpy(values) for tensor, values in weights.items()})
    driver = Driver(cpu_runner(checkpoint, num_blocks=100, block_size=16))
    prompts = torch.randint(CONFIG.vocab_size, (50, 16), generator=torch.Generator().manual_seed(0))
    ours = driver.run([driver.add(prompt, max_chunk=8) for prompt in prompts.tolist()], 16)
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    theirs = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
    best = torch.stack(theirs.logits).topk(2).values  # [16 tokens, 50 prompts, 2]
    # Of two tokens that are as good within rounding, each processor chooses its own.
    clear = (best[..., 0] - best[..., 1] > 1e-4).all(dim=0)
    assert clear.sum() >= 40
    assert torch.tensor(ours)[clear].equal(theirs.sequences[clear, 16:])


HOSTILE = ["(a+)+$", "(.*)*x", "(", "[" * 10_000]


def test_patterns_of_module_names_are_not_matched(tmp_path):
    """Tensors say how they are quantised: a pattern that backtracks for ever, or is none, costs nothing."""
    files = written(VARIANTS["gptq"])
    quantisation = files.fields["config.json"]["quantization_config"]
    quantisation["dynamic"] = {f"+:{pattern}": {"bits": 8} for pattern in HOSTILE}
    checkpoint = load_checkpoint(files.save(tmp_path))
    assert np.array_equal(checkpoint.tensor(DOWN), files.weights[DOWN])
    files = written(VARIANTS["ct mixed"])
    quantisation = files.fields["config.json"]["quantization_config"]
    quantisation["ignore"] = quantisation["config_groups"]["group_0"]["targets"] = [f"re:{it}" for it in HOSTILE]
    checkpoint = load_checkpoint(files.save(tmp_path))
    assert np.array_equal(checkpoint.tensor(DOWN), files.weights[DOWN])
