"""A GGUF header is read as the gguf library reads it, and a hostile or damaged one costs an error and nothing else."""

import struct
import tracemalloc

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_executor.errors import ModelCorruptError, UnsupportedModelError
from paceline_executor.weights import load_checkpoint, load_tokenizer
from paceline_executor.weights.gguf.header import read_gguf_header
from random_models import RandomCheckpoint, gguf_parts

UINT32, STRING, ARRAY, F32 = 4, 8, 9, 0


def text(value):
    """A string as GGUF has it: its length in bytes, then the bytes."""
    return struct.pack("<Q", len(value)) + value


def pair(key, value_type, value):
    """One metadata key with its value."""
    return text(key) + struct.pack("<I", value_type) + value


def tensor(name=b"t", shape=(8,), kind=F32, offset=0):
    """One record of the tensor directory."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf_bytes(pairs=(), tensors=(), data=b"", *, magic=b"GGUF", version=3, num_tensors=None, num_pairs=None):
    """A whole file of aligned parts; counts default to the truth."""
    counts = (len(tensors) if num_tensors is None else num_tensors, len(pairs) if num_pairs is None else num_pairs)
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return header + b"\0" * (-len(header) % 32) + data


HUGE = 2**62
ALIGNMENT = b"general.alignment"
FLOATS = b"\0" * 32
HOSTILE = {
    "empty": (b"", "does not start with the letters GGUF"),
    "another format": (b"PK\3\4" + b"\0" * 60, "does not start with the letters GGUF"),
    "only the magic": (b"GGUF", "the file ends"),
    "too many tensors": (gguf_bytes(num_tensors=HUGE), f"announces {HUGE} tensors"),
    "too many keys": (gguf_bytes(num_pairs=HUGE), f"announces {HUGE} metadata keys"),
    "more keys than there are": (gguf_bytes(num_pairs=60_000), "the file ends"),
    "more tensors than there are": (gguf_bytes(num_tensors=60_000), "the file ends"),
    "endless key": (gguf_bytes([struct.pack("<Q", HUGE)]), "string of 4611686018427387904 bytes"),
    "endless string": (gguf_bytes([pair(b"k", STRING, struct.pack("<Q", HUGE))]), "is too long"),
    "string beyond the end": (gguf_bytes([pair(b"k", STRING, struct.pack("<Q", 4096))]), "the file ends"),
    "broken UTF-8": (gguf_bytes([pair(b"k", STRING, text(b"\xff\xfe"))]), "is not UTF-8"),
    "key twice": (gguf_bytes([pair(b"k\n", UINT32, b"\0" * 4)] * 2), r"key 'k\\n' appears twice"),
    "unknown value type": (gguf_bytes([pair(b"k", 77, b"\0" * 8)]), "the unknown type 77"),
    "a third truth value": (gguf_bytes([pair(b"k", 7, b"\2")]), "other than 0 and 1"),
    "endless array": (gguf_bytes([pair(b"k", ARRAY, struct.pack("<IQ", UINT32, HUGE))]), "the file ends"),
    "endless array of strings": (gguf_bytes([pair(b"k", ARRAY, struct.pack("<IQ", STRING, HUGE))]), "more than the"),
    "alignment of zero": (gguf_bytes([pair(ALIGNMENT, UINT32, struct.pack("<I", 0))]), "general.alignment is 0"),
    "odd alignment": (gguf_bytes([pair(ALIGNMENT, UINT32, struct.pack("<I", 24))]), "general.alignment is 24"),
    "alignment as text": (gguf_bytes([pair(ALIGNMENT, STRING, text(b"32"))]), "general.alignment is not an integer"),
    "tensor name too long": (gguf_bytes([], [tensor(b"n" * 65)], FLOATS), "string of 65 bytes"),
    "no dimensions": (gguf_bytes([], [tensor(shape=())], FLOATS), "has 0 dimensions"),
    "five dimensions": (gguf_bytes([], [tensor(shape=(1,) * 5)], FLOATS), "has 5 dimensions"),
    "empty dimension": (gguf_bytes([], [tensor(shape=(8, 0))], FLOATS), "that F32 cannot hold"),
    "product beyond 64 bits": (gguf_bytes([], [tensor(shape=(2**33, 2**33))], FLOATS), "larger than the file"),
    "rows that split a block": (gguf_bytes([], [tensor(shape=(33,), kind=2)], FLOATS), "that Q4_0 cannot hold"),
    "tensor beyond the end": (gguf_bytes([], [tensor(offset=32)], FLOATS), "the file ends before tensor 't' does"),
    "offset of 2**64 - 1": (gguf_bytes([], [tensor(offset=2**64 - 1)], FLOATS), "the file ends before"),
    "tensor twice": (gguf_bytes([], [tensor(), tensor(offset=32)], FLOATS * 2), "the same name"),
    "tensors overlap": (gguf_bytes([], [tensor(), tensor(b"u", offset=16)], FLOATS * 2), "'u' overlaps another"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_refused_in_one_line_and_little_memory(tmp_path, case):
    content, message = HOSTILE[case]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelCorruptError, match=message) as refusal:
            read_gguf_header(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert "\n" not in str(refusal.value)


NEWER = {
    "version 1": (gguf_bytes(version=1), "GGUF version 1"),
    "version 4": (gguf_bytes(version=4), "GGUF version 4"),
    "big-endian": (gguf_bytes(version=3 << 24), "big-endian"),
    "nested arrays": (
        gguf_bytes([pair(b"k", ARRAY, struct.pack("<IQ", ARRAY, 1) + struct.pack("<IQ", UINT32, 0))]),
        "array of arrays",
    ),
    "unknown tensor type": (gguf_bytes([], [tensor(kind=999)], FLOATS), "the unknown type 999"),
}


@pytest.mark.parametrize("case", NEWER)
def test_what_the_format_may_hold_and_the_reader_does_not_know_is_unsupported(tmp_path, case):
    """Not called damage: the file may be fine."""
    content, message = NEWER[case]
    path = tmp_path / "newer.gguf"
    path.write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=message):
        read_gguf_header(path)


def test_a_header_beyond_the_bound_is_refused(tmp_path):
    """A large file does not make a large header acceptable: memory for the header is bounded."""
    path = tmp_path / "large.gguf"
    path.write_bytes(gguf_bytes([pair(b"k", ARRAY, struct.pack("<IQ", UINT32, 50_000_000))]))
    with path.open("r+b") as file:
        file.truncate(1 << 30)
    with pytest.raises(ModelCorruptError, match="the header exceeds"):
        read_gguf_header(path)


def test_a_header_is_read_as_the_library_reads_it(tmp_path):
    parts = gguf_parts(RandomCheckpoint())
    parts.metadata |= {"a.flag": True, "a.float": 0.1, "a.list": [3, 1, 2], "a.text": "naïve"}
    path = parts.write(tmp_path / "tiny.gguf")
    header, library = read_gguf_header(path), gguf.GGUFReader(path)

    keys = [key for key in library.fields if not key.startswith("GGUF.")]
    assert list(header.metadata) == keys
    for key in keys:
        found = header.metadata[key]
        plain = list(found) if isinstance(found, tuple) else found.tolist() if isinstance(found, np.ndarray) else found
        assert plain == library.fields[key].contents(), key
    assert list(header.tensors) == [tensor.name for tensor in library.tensors]
    for expected in library.tensors:
        info = header.tensors[expected.name]
        assert info.shape == tuple(reversed(expected.shape.tolist()))
        assert (info.start, info.num_bytes) == (expected.data_offset, expected.n_bytes)
        assert info.quantization == expected.tensor_type


@pytest.fixture(scope="module")
def sound_file(tmp_path_factory):
    """A small valid model with a tokenizer, as bytes, and a path to write damaged copies to."""
    path = gguf_parts(RandomCheckpoint()).write(tmp_path_factory.mktemp("fuzz") / "tiny.gguf")
    return path, path.read_bytes()


def read_everything(path):
    """What an executor does with a model file at its start."""
    checkpoint = load_checkpoint(path)
    for name in checkpoint.config.tensor_shapes():
        checkpoint.tensor(name)
    load_tokenizer(path)


@settings(max_examples=settings.default.max_examples * 5)
@given(data=st.data())
def test_damage_anywhere_ends_in_success_or_a_typed_error(sound_file, data):
    """Flipped and cut bytes, mostly in the header: no other exception, no crash, no hang."""
    path, sound = sound_file
    header_bytes = 5_856
    places = st.integers(0, header_bytes) | st.integers(0, 400) | st.integers(0, len(sound) - 1)
    damaged = bytearray(sound)
    for place, value in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), max_size=4)):
        damaged[place] = value
    end = data.draw(st.none() | places)
    path.write_bytes(damaged[:end])
    try:
        read_everything(path)
    except (ModelCorruptError, UnsupportedModelError) as error:
        assert "\n" not in str(error)  # noqa: PT017 (success is fine too)
