"""The files of a model: GGUF, safetensors, the JSON beside them, tokenizers. By what an executor reads at its start."""

import json
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import httpx2
from huggingface_hub import set_client_factory
from huggingface_hub.utils._http import default_client_factory
from safetensors.numpy import save

from edge_rig.tokenizers import byte_level_tokenizer, sentence_piece_tokenizer
from fuzzing.target import Target, scratch, tokenizer
from paceline_executor.errors import ModelError, StepTimesError
from paceline_executor.runner.step_times import read_step_times
from paceline_executor.weights import load_checkpoint, load_tokenizer
from paceline_executor.weights.fetch.hub_client import HubClient
from paceline_executor.weights.gguf.header import read_gguf_header
from paceline_executor.weights.hf.eagle3 import eagle3_from_folder
from paceline_executor.weights.hf.tokenizer import tokenizer_from_folder
from paceline_scheduler.api.text.tokenizer import read_text_model
from paceline_scheduler.errors import InvalidRequestError, UnsupportedError
from random_models import (
    TINY_CONFIG,
    GgufParts,
    MetadataInput,
    RandomCheckpoint,
    byte_level_metadata,
    gguf_parts,
)
from random_models.eagle3 import Dialect, random_head

# As few numbers as a model may have, so that most of an input is what the parser decides by.
_SMALLEST = replace(
    TINY_CONFIG, num_layers=1, hidden_size=4, intermediate_size=4, num_heads=1, num_kv_heads=1, head_dim=4, vocab_size=8
)
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


def read_gguf(data: bytes) -> None:
    """Be an executor with this file."""
    path = scratch() / "model.gguf"
    path.write_bytes(data)
    for read in (read_gguf_header, _read_weights, load_tokenizer):
        _refused_in_a_line(read, path)


def _refused_in_a_line(read: Callable[[Path], object], path: Path) -> None:
    sentence = ""
    try:
        read(path)
    except ModelError as error:
        sentence = str(error)
    assert "\n" not in sentence, "a refusal is one line"


def _read_weights(path: Path) -> None:
    checkpoint = load_checkpoint(path)
    for name in checkpoint.config.tensor_shapes():
        checkpoint.tensor(name)


def _sound_gguf() -> Iterator[bytes]:
    path = scratch() / "sound.gguf"
    yield gguf_parts(RandomCheckpoint(replace(_SMALLEST, vocab_size=262))).write(path).read_bytes()
    yield GgufParts({"general.architecture": "llama"} | byte_level_metadata(("h e",))).write(path).read_bytes()
    yield GgufParts(_scored_metadata()).write(path).read_bytes()
    yield b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<II", 4, 7)


def _scored_metadata() -> dict[str, MetadataInput]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "e", "he"]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(index) for index in range(len(tokens))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, 1, 1, 1, 1],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@dataclass(frozen=True, slots=True)
class _Folder:
    """A folder that is sound but for one of its files: the first byte of an input says which, the rest is its content.

    files: what they are when it is sound; those in `kept` are never changed.
    """

    name: str
    files: Callable[[], dict[str, bytes]]
    reads: tuple[Callable[[Path], object], ...]
    kept: tuple[str, ...] = ()

    def changed(self) -> list[str]:
        return sorted(self.files().keys() - set(self.kept))

    def run(self, data: bytes) -> None:
        """Be an executor with this folder."""
        names = self.changed()
        self.read_with(names[data[0] % len(names) if data else 0], data[1:])

    def read_with(self, name: str, content: bytes) -> None:
        path = self._path()
        (path / name).write_bytes(content)
        for read in self.reads:
            _refused_in_a_line(read, path)
        (path / name).write_bytes(self.files()[name])

    def seeds(self) -> Iterator[bytes]:
        for number, name in enumerate(self.changed()):
            yield bytes([number]) + self.files()[name]

    def _path(self) -> Path:
        path = scratch() / self.name
        if not path.is_dir():
            path.mkdir()
            for name, content in self.files().items():
                (path / name).write_bytes(content)
        return path


@cache
def _model_files() -> dict[str, bytes]:
    checkpoint = RandomCheckpoint(_SMALLEST)
    tensors = {name: checkpoint.tensor(name) for name in _SMALLEST.tensor_shapes()}
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    return {
        "config.json": json.dumps(_CONFIG).encode(),
        "generation_config.json": json.dumps({"eos_token_id": [1], "temperature": 0.7}).encode(),
        "model.safetensors": save(tensors),
        "model.safetensors.index.json": json.dumps(index).encode(),
        "tokenizer.json": byte_level_tokenizer().to_str().encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "<|im_end|>", "chat_template": "x"}).encode(),
    }


@cache
def _head_files() -> dict[str, bytes]:
    folder = random_head(TINY_CONFIG, draft_vocab_size=20).write(scratch() / "sound-head")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _read_head(folder: Path) -> None:
    checkpoint = eagle3_from_folder(folder, TINY_CONFIG)
    for name in checkpoint.tensors:
        checkpoint.tensor(name)


_MODEL = _Folder("model", _model_files, (_read_weights, tokenizer_from_folder), kept=("tokenizer.json",))
_HEAD = _Folder("head", _head_files, (_read_head,))


def _sound_models() -> Iterator[bytes]:
    yield from _MODEL.seeds()
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}
    gemma = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "sliding_window": 4}}
    for config in (_CONFIG | {"rope_scaling": yarn}, _CONFIG | {"model_type": "qwen3"}, _CONFIG | gemma):
        yield b"\0" + json.dumps(config).encode()


def _sound_heads() -> Iterator[bytes]:
    yield from _HEAD.seeds()
    other = random_head(TINY_CONFIG).write(scratch() / "speculators", Dialect.SPECULATORS)
    yield b"\0" + (other / "config.json").read_bytes()


def read_tokenizer(data: bytes) -> None:
    """Be an executor with this tokenizer.json, and a scheduler that is sent it."""
    _MODEL.read_with("tokenizer.json", data)
    with suppress(UnsupportedError, InvalidRequestError):
        model = read_text_model(replace(tokenizer(), json=data), 400)
        model.encode_text("Hello, world")
        model.spelling.decode([1, 2, 3, 399], skip_special_tokens=True)


def _sound_tokenizers() -> Iterator[bytes]:
    for sound in (byte_level_tokenizer(), sentence_piece_tokenizer()):
        yield sound.to_str().encode()
    yield b'{"version":"1.0","added_tokens":[],"model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]}}'


def read_listing(data: bytes) -> None:
    """Be an executor that is answered so by the hub."""
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, content=data))
    set_client_factory(lambda: httpx2.Client(transport=transport))
    try:
        _refused_in_a_line(_list_files, scratch())
    finally:
        set_client_factory(default_client_factory)


def _list_files(_: Path) -> None:
    listing = HubClient("org/name", "http://hub").list_files(None)
    assert listing.commit.isalnum(), "it is the name of a folder"
    for file in listing.files.values():
        assert type(file.size) is int, "it is a number"
        assert file.digest.isalnum(), "it is the name of a file"


def _sound_listings() -> Iterator[bytes]:
    siblings = [
        {"rfilename": "config.json", "size": 3, "blobId": 40 * "a"},
        {
            "rfilename": "a.gguf",
            "size": 4,
            "blobId": 40 * "b",
            "lfs": {"sha256": 64 * "c", "size": 4, "pointerSize": 9},
        },
    ]
    yield json.dumps({"id": "org/name", "sha": 40 * "a", "siblings": siblings, "tags": []}).encode()


def read_step_time_file(data: bytes) -> None:
    """Be a simulated executor with this table."""
    path = scratch() / "steps.json"
    path.write_bytes(data)
    with suppress(StepTimesError):
        read_step_times(path).step_ns(7, 100)


def _sound_step_times() -> Iterator[bytes]:
    points = [{"num_tokens": 1, "duration_us": 5}, {"num_tokens": 9, "num_pairs": 3, "duration_us": 21.5}]
    yield json.dumps({"points": points, "us_per_million_pairs": 40}).encode()


TARGETS = (
    Target("gguf", read_gguf, _sound_gguf),
    Target("model-folder", _MODEL.run, _sound_models),
    Target("tokenizer-json", read_tokenizer, _sound_tokenizers),
    Target("hub-listing", read_listing, _sound_listings),
    Target("eagle3-head", _HEAD.run, _sound_heads),
    Target("step-times", read_step_time_file, _sound_step_times),
)
