"""Quantised folders that cannot be served are refused in one sentence, which names the file, the tensor and the reason.

"Damaged" is what another download may mend.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.process.command import ExitCode
from paceline_executor.errors import ModelCorruptError, ModelError, UnsupportedModelError
from paceline_executor.weights import load_checkpoint
from quantised_files import VARIANTS, written

DOWN = "model.layers.0.mlp.down_proj"
STATE = f"{DOWN}.weight.quant_state.bitsandbytes__nf4"
DAMAGED, WRONG, UNSUPPORTED = "is damaged: ", "cannot be used: ", "cannot be served by this version: "


@dataclass(frozen=True)
class Bad:
    """A variant, what becomes of its files, and the sentence."""

    variant: str
    change: Callable
    kind: str
    sentence: str  # after the file and the kind
    file: str = "model.safetensors"


def key(**changes):
    """Keys of quantization_config as they should not be; None takes one out."""

    def change(files):
        files.fields["config.json"]["quantization_config"] |= changes

    return change


def scheme(**changes):
    """The same of the first group's weights."""

    def change(files):
        groups = files.fields["config.json"]["quantization_config"]["config_groups"]
        groups["group_0"]["weights"] |= changes

    return change


def without(end):
    return lambda files: files.tensors.pop(f"{DOWN}.{end}")


def put(end, make):
    """One tensor is made another."""

    def change(files):
        name = f"{DOWN}.{end}"
        files.tensors[name] = make(files.tensors.get(name)).contiguous()

    return change


def holding(end, value, at=0):
    def make(tensor):
        changed = tensor.clone()
        changed.view(-1)[at] = value
        return changed

    return put(end, make)


def state(data):
    return put("weight.quant_state.bitsandbytes__nf4", lambda _: torch.tensor(list(data), dtype=torch.uint8))


def tied(files):
    files.fields["config.json"]["tie_word_embeddings"] = True


def cut_to_156(files):
    """The intermediate size: no whole words."""
    files.fields["config.json"]["intermediate_size"] = 156
    key(group_size=-1)(files)
    for name, tensor in files.tensors.items():
        if "gate_proj" in name or "up_proj" in name:
            files.tensors[name] = tensor[:156].contiguous()
        elif name.endswith("down_proj.qweight"):
            files.tensors[name] = tensor[:, :19].contiguous()


def named(end, rest):
    return f"tensor '{DOWN}.{end}' {rest}"


STATED = {"quant_type": "nf4", "blocksize": 64, "shape": [96, 160]}
METHODS = "gptq, awq, compressed-tensors, fp8, fbgemm_fp8, modelopt, bitsandbytes"
BAD = {
    # configurations
    "another method": Bad(
        "gptq",
        key(quant_method="torchao"),
        UNSUPPORTED,
        f"its weights are quantised by 'torchao'; floats are read, and what is quantised by {METHODS}",
        "config.json",
    ),
    "no method": Bad(
        "gptq", key(quant_method=None), WRONG, "quantization_config.quant_method is missing", "config.json"
    ),
    "3 bits": Bad(
        "gptq", key(bits=3), UNSUPPORTED, "its weights are gptq of 3 bits; 4 and 8 bits are read", "config.json"
    ),
    "5 bits": Bad("awq", key(bits=5), UNSUPPORTED, "its weights are awq of 5 bits; 4 bits are read", "config.json"),
    **{
        f"bits in quotes of {variant}": Bad(
            variant, key(bits="4"), WRONG, "quantization_config.bits is not an integer", "config.json"
        )
        for variant in ("gptq", "awq gemv")
    },
    "another layout": Bad(
        "gptq",
        key(checkpoint_format="marlin"),
        UNSUPPORTED,
        "its weights are gptq in the layout 'marlin'",
        "config.json",
    ),
    "gemv_fast": Bad(
        "awq", key(version="gemv_fast"), UNSUPPORTED, "its weights are awq in the layout 'gemv_fast'", "config.json"
    ),
    "another algorithm": Bad(
        "modelopt",
        key(quant_algo="W4A8_AWQ"),
        UNSUPPORTED,
        "its weights are modelopt 'W4A8_AWQ'; FP8, FP8_PER",
        "config.json",
    ),
    "a format of nobody": Bad(
        "w4a16", key(format="marlin-24"), UNSUPPORTED, "its weights are compressed-tensors 'marlin-24'", "config.json"
    ),
    "sparse": Bad(
        "w4a16",
        key(sparsity_config={"format": "sparse-24-bitmask"}),
        UNSUPPORTED,
        "its weights are compressed-tensors 'sparse-24-bitmask'",
        "config.json",
    ),
    "transforms": Bad(
        "w4a16",
        key(transform_config={"config_groups": {"u": {"type": "hadamard"}}}),
        UNSUPPORTED,
        "its transform_config multiplies the inputs",
        "config.json",
    ),
    "3 bits packed": Bad(
        "w4a16", scheme(num_bits=3), UNSUPPORTED, "its weights are compressed-tensors of 3 bits", "config.json"
    ),
    "a group of nothing": Bad(
        "gptq", key(group_size=0), WRONG, "quantization_config.group_size is 0, outside 1", "config.json"
    ),
    "a block of halves": Bad(
        "fp8 blocks",
        key(weight_block_size=[1.5, 128]),
        WRONG,
        "quantization_config.weight_block_size is not two whole numbers",
        "config.json",
    ),
    "no configuration": Bad(
        "gptq",
        lambda files: files.fields["config.json"].pop("quantization_config"),
        UNSUPPORTED,
        f"{DOWN} is quantised, and neither config.json nor quantize_config.json nor quant_config.json nor hf_quant",
    ),
    "gptq called awq": Bad(
        "gptq",
        key(quant_method="awq", version="gemm"),
        UNSUPPORTED,
        f"it has a tensor '{DOWN}.g_idx', which a matrix of awq",
    ),
    "awq called gptq": Bad(
        "awq", key(quant_method="gptq"), WRONG, named("qweight", "has shape (160, 12) where (any, 96)")
    ),
    "tied, and an output matrix of its own": Bad(
        "gptq dynamic, output quantised",
        tied,
        WRONG,
        "it sets tie_word_embeddings, and 'lm_head.g_idx' is of a matrix apart",
        "config.json",
    ),
    # tensors that are missing, too many, of another type or shape
    "3 bits by a dynamic rule": Bad(
        "gptq", put("qweight", lambda it: it[:15]), UNSUPPORTED, f"{DOWN} is gptq of 3 bits; 4 and 8 bits are read"
    ),
    "too few words": Bad(
        "gptq", put("qweight", lambda it: it[:19]), UNSUPPORTED, f"{DOWN} is gptq of 3 bits; 4 and 8 bits are read"
    ),
    "words of no bits": Bad(
        "gptq", put("qweight", lambda it: it[:2]), WRONG, named("qweight", "has shape (2, 96) where (20, 96) is needed")
    ),
    "unpacked zeros": Bad(
        "gptq asym",
        put("qzeros", lambda _: torch.ones(5, 96)),
        WRONG,
        named("qzeros", "is of type float32 where int32"),
    ),
    "no zeros": Bad(
        "gptq asym", without("qzeros"), DAMAGED, named("qzeros", "is missing beside its g_idx, qweight, scales")
    ),
    "no order": Bad("gptq act order", without("g_idx"), DAMAGED, named("g_idx", "is missing beside its")),
    "too few groups": Bad(
        "gptq", put("scales", lambda it: it[:4]), WRONG, named("qzeros", "has shape (5, 12) where (4, 12) is needed")
    ),
    "groups of another size": Bad(
        "gptq without g_idx", key(group_size=64), WRONG, "has 5 groups, and group_size 64 makes others of 160"
    ),
    "a group that does not divide": Bad(
        "awq", key(group_size=64), WRONG, "cannot be awq: group_size 64 does not divide 160 inputs"
    ),
    "words that are not whole": Bad(
        "awq gemv", cut_to_156, WRONG, "cannot be awq: words hold 8 codes, of 96 outputs and 156"
    ),
    "too few columns of zeros": Bad(
        "awq gemv", put("scales", lambda it: it[:, :4]), WRONG, named("scales", "has 4 columns for 5 groups")
    ),
    "half bytes of zeros": Bad(
        "awq", put("qzeros", lambda it: it.to(torch.int16)), WRONG, named("qzeros", "is of type int16 where int32")
    ),
    "a lying shape": Bad(
        "w4a16",
        put("weight_shape", lambda _: torch.tensor([1 << 62, 160])),
        WRONG,
        named("weight_shape", "does not say"),
    ),
    "no scale": Bad("w4a16", without("weight_scale"), DAMAGED, named("weight_scale", "is missing beside its")),
    "no zeros of one that has": Bad(
        "w4a16 asym",
        without("weight_zero_point"),
        DAMAGED,
        named("weight_zero_point", "is missing, which config_groups"),
    ),
    "no order of one that has": Bad(
        "w4a16 act order", without("weight_g_idx"), DAMAGED, named("weight_g_idx", "is missing, which config_groups")
    ),
    "scales of other groups": Bad(
        "w4a16", scheme(group_size=16), WRONG, "has 5 scales a row, where group_size 16 of 160 inputs makes 10"
    ),
    "groups that do not divide": Bad(
        "w4a16", scheme(group_size=64), WRONG, "group_size 64 of 160 inputs makes no whole"
    ),
    "bits of no group": Bad(
        "w4a16", scheme(num_bits=8), WRONG, "has 20 columns, and config_groups has no integers of so"
    ),
    "float8 without scale": Bad(
        "fp8 blocks", without("weight_scale_inv"), DAMAGED, f"float8 tensor '{DOWN}.weight' has no scale beside it"
    ),
    "blocks of no size": Bad(
        "fp8 blocks", key(weight_block_size=None), WRONG, named("weight_scale_inv", "is of shape (1, 2), neither one")
    ),
    "blocks of another size": Bad("fp8 blocks", key(weight_block_size=[64, 64]), WRONG, "or block of 64 x 64"),
    "a scale nobody knows": Bad(
        "awq",
        put("pre_quant_scale", lambda _: torch.ones(160)),
        UNSUPPORTED,
        f"it has a tensor '{DOWN}.pre_quant_scale', which",
    ),
    "a bias that is not 0": Bad(
        "gptq",
        put("bias", lambda _: torch.ones(96)),
        UNSUPPORTED,
        f"it has a tensor '{DOWN}.bias' that a llama model",
        "",
    ),
    "no state": Bad("nf4", without("weight.quant_state.bitsandbytes__nf4"), DAMAGED, f"{DOWN} has neither SCB nor"),
    "a state that is garbage": Bad("nf4", state(b"\xff{"), DAMAGED, f"tensor '{STATE}' is not JSON"),
    "a state that is deep": Bad("nf4", state(b"[" * 60_000), DAMAGED, f"tensor '{STATE}' is not JSON"),
    "a state that is large": Bad("nf4", state(b" " * 70_000), WRONG, f"tensor '{STATE}' has 70000 bytes"),
    "a state of another matrix": Bad(
        "nf4",
        state(json.dumps(STATED | {"shape": [96, 1 << 62]}).encode()),
        WRONG,
        f"tensor '{STATE}': shape is '[96, 4611686018427387904]'",
    ),
    "a block of nothing": Bad(
        "nf4",
        state(json.dumps(STATED | {"blocksize": 0}).encode()),
        WRONG,
        f"tensor '{STATE}': blocksize is 0, outside",
    ),
    "too few scales": Bad(
        "nf4", put("weight.absmax", lambda it: it[:7]), WRONG, named("weight.absmax", "has shape (7,) where (240) is")
    ),
    "too few bytes": Bad("nf4", put("weight", lambda it: it[:7]), WRONG, named("weight", "has 7 bytes where 7680 are")),
    "rows for a GPU": Bad(
        "LLM.int8", holding("weight_format", 1), UNSUPPORTED, f"{DOWN} has its rows in an order of some GPU"
    ),
    # numbers that cannot be
    **{
        f"{value} as a scale of {variant}": Bad(
            variant, holding(end, value), DAMAGED, named(end, "holds values that are not")
        )
        for variant, end in (("gptq", "scales"), ("awq", "scales"), ("w4a16", "weight_scale"), ("nf4", "weight.absmax"))
        for value in (torch.nan, -torch.inf)
    },
    "scales of 0": Bad("gptq", put("scales", torch.zeros_like), DAMAGED, named("scales", "has no scale but 0")),
    "a scale below 0": Bad(
        "fp8 blocks", holding("weight_scale_inv", -1), DAMAGED, named("weight_scale_inv", "has a scale below 0")
    ),
    "an order beyond": Bad(
        "gptq act order", holding("g_idx", 7), WRONG, named("g_idx", "leads to group 7, and there are 5")
    ),
    "an order below 0": Bad(
        "gptq act order", holding("g_idx", -1), WRONG, named("g_idx", "leads to group -1, and there are")
    ),
    "an order without a group": Bad(
        "w4a16 act order",
        put("weight_g_idx", lambda it: it.clamp(max=3)),
        WRONG,
        named("weight_g_idx", "leads to 4 of 5 groups"),
    ),
    "an exponent that is no number": Bad(
        "mxfp4", holding("weight_scale", 255), DAMAGED, named("weight_scale", "holds values")
    ),
    "a divisor of 0": Bad(
        "nvfp4", holding("weight_global_scale", 0), DAMAGED, named("weight_global_scale", "has no scale")
    ),
    "factors of no whole": Bad(
        "modelopt nvfp4",
        put("weight_scale_2", lambda _: torch.ones(2)),
        WRONG,
        named("weight_scale_2", "has shape (2,) where one number is needed"),
    ),
    "no factor of the whole": Bad(
        "modelopt nvfp4",
        without("weight_scale_2"),
        DAMAGED,
        named("weight_scale_2", "is missing beside its input_scale, weight, weight_scale"),
    ),
    **{
        f"a product of {variant} that is too large": Bad(
            variant, holding(end, 3e38), DAMAGED, named(codes, "holds values")
        )
        for variant, end, codes in (
            ("ct float8 rows", "weight_scale", "weight"),
            ("fp8 blocks", "weight_scale_inv", "weight"),
            ("modelopt nvfp4", "weight_scale_2", "weight"),
            ("w4a16", "weight_scale", "weight_packed"),
        )
    },
    "a float8 that is no number": Bad(
        "fp8 blocks",
        holding("weight", torch.nan),
        DAMAGED,
        named("weight", "holds values that are not finite"),
    ),
}


def read_all(folder):
    checkpoint = load_checkpoint(folder)
    for name in checkpoint.config.tensor_shapes():
        checkpoint.tensor(name)
        checkpoint.quantized(name)


@pytest.mark.parametrize("name", BAD)
def test_a_folder_that_cannot_be_is_refused_by_file_tensor_and_reason(tmp_path, name):
    bad = BAD[name]
    files = written(VARIANTS[bad.variant])
    bad.change(files)
    with pytest.raises(ModelError) as caught:
        read_all(files.save(tmp_path))
    sentence = str(caught.value)
    assert sentence.startswith(f"{tmp_path / bad.file} {bad.kind}")
    assert bad.sentence.replace("'", "") in sentence.replace("'", "")
    assert "\n" not in sentence
    assert isinstance(caught.value, UnsupportedModelError if bad.kind == UNSUPPORTED else ModelCorruptError)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bad")


WEIRD = st.sampled_from(
    [None, True, 0, -1, 1, 3, 4, 16, 2**31, 2**64, 0.5, float("nan"), "", "x", [], [[]], [64, 64], {}]
)


def spoil_key(draw, fields):
    """One value, of whatever depth, becomes something else."""
    while True:
        key = draw(st.sampled_from(sorted(fields) if isinstance(fields, dict) else range(len(fields))))
        if not isinstance(fields[key], dict | list) or not fields[key] or draw(st.booleans()):
            fields[key] = deepcopy(draw(WEIRD))
            return
        fields = fields[key]


def spoil_tensor(draw, tensors):
    """One tensor goes, is cut, made of another type, or has a few other bytes."""
    name = draw(st.sampled_from([name for name in sorted(tensors) if "_proj" in name]))
    tensor = tensors.pop(name)
    kind = draw(st.sampled_from(["gone", "cut", "flat", "type", "bytes", "bytes"]))
    if kind == "cut":
        tensors[name] = tensor[: draw(st.integers(0, len(tensor)))] if tensor.ndim else tensor[None]
    elif kind == "flat":
        tensors[name] = tensor.reshape(-1)
    elif kind == "type":
        other = [torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float8_e4m3fn]
        tensors[name] = torch.zeros(tensor.shape, dtype=draw(st.sampled_from(other)))
    elif kind == "bytes" and tensor.numel():
        data = bytearray(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        for place in draw(st.lists(st.integers(0, len(data) - 1), max_size=3)):
            data[place] = draw(st.integers(0, 255))
        tensors[name] = torch.frombuffer(data, dtype=torch.uint8).view(tensor.dtype).reshape(tensor.shape)


@settings(max_examples=settings.default.max_examples)
@given(data=st.data(), name=st.sampled_from(sorted(VARIANTS)))
def test_whatever_else_is_wrong_is_refused_in_a_line_or_read(folder, data, name):
    """No other exception, and no warning."""
    files = written(VARIANTS[name])
    for file in ("quantize_config.json", "quant_config.json", "hf_quant_config.json"):
        (folder / file).unlink(missing_ok=True)
    for _ in range(data.draw(st.integers(1, 2))):
        if data.draw(st.booleans()):
            file = VARIANTS[name].file
            spoil_key(data.draw, files.fields[file].get("quantization_config") or files.fields[file])
        else:
            spoil_tensor(data.draw, files.tensors)
    try:
        read_all(files.save(folder))
    except ModelError as error:
        assert "\n" not in str(error)  # noqa: PT017 (success is fine too)


def test_a_file_that_is_cut_is_damaged(tmp_path):
    folder = written(VARIANTS["awq"]).save(tmp_path)
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ModelCorruptError, match="is damaged: the safetensors library refuses it"):
        read_all(folder)


def test_a_name_in_two_files_is_named(tmp_path):
    folder = written(VARIANTS["awq"]).save(tmp_path)
    for name in "ab":
        (folder / f"{name}.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    places = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(places))
    with pytest.raises(ModelCorruptError, match=r"b\.safetensors is damaged: tensor '.*' appears twice"):
        read_all(folder)


def test_a_process_with_such_a_model_never_listens(tmp_path):
    files = written(VARIANTS["gptq"])
    holding("scales", torch.nan)(files)
    command = [sys.executable, "-m", "paceline_executor", "--model", str(files.save(tmp_path)), "--metrics-port", "0"]
    command += ["--port", "0", "--health-port", "0"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == ExitCode.MODEL
    assert f"tensor {DOWN}.scales holds values that are not finite" in done.stderr
    assert done.stderr.count("\n") == 1
    assert '"ready"' not in done.stdout


TOKENIZER = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}
