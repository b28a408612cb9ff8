"""What is easily given in place of a model is named for what it is, with what to do."""

import json
import re
import subprocess
import sys

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from paceline_executor.errors import HubUnreachableError, ModelCorruptError, ModelError, ModelNotFoundError
from paceline_executor.weights import FetchOptions, load_checkpoint, load_model, resolve_model
from random_models import RandomCheckpoint, gguf_parts

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4665\nsize 135\n"
CONFIG = transformers.LlamaConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


@pytest.fixture
def folder(tmp_path):
    """A model in several files, with its tokenizer."""
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(CONFIG).save_pretrained(tmp_path, max_shard_size="20KB")
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(96)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    load_model(tmp_path)
    return tmp_path


def refusal(path):
    with pytest.raises(ModelError) as caught:
        load_model(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def told_command(sentence):
    """The arguments of the python command that a sentence ends with."""
    (code,) = re.findall(r"python -c '(.*)'$", sentence)
    return [sys.executable, "-c", code]


def test_a_missing_part_is_an_incomplete_download(folder):
    shards = sorted(folder.glob("*.safetensors"))
    shards[1].unlink()
    assert f"is not complete: the index names {len(shards)} files, 1 are missing, {shards[1].name}" in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json"])
def test_a_file_that_git_has_not_brought_is_a_pointer(folder, name):
    (folder / name).write_text(POINTER)
    assert (
        refusal(folder) == f"{folder / name} is a git-lfs pointer, not the file itself: run git lfs pull in its folder"
    )


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf"])
def test_weights_that_git_has_not_brought_are_a_pointer(folder, name):
    for shard in folder.glob("model*"):
        shard.unlink()
    (folder / name).write_text(POINTER)
    with pytest.raises(ModelCorruptError, match=f"{name} is a git-lfs pointer, not the file itself: run git lfs pull"):
        load_checkpoint(folder)


def test_an_adapter_is_named_with_its_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    (tmp_path / "adapter_model.bin").touch()
    assert refusal(tmp_path) == (
        f"{tmp_path} is an adapter of 'org/base': adapters are not served; merge it into its model"
    )


def test_a_part_of_a_model_leads_to_its_folder(folder):
    assert "it is a part of a model; give the path of the folder that it is in" in refusal(folder / "config.json")


def test_a_gguf_file_is_known_by_how_it_begins(tmp_path):
    path = gguf_parts(RandomCheckpoint()).write(tmp_path / "model.bin")
    for given in (path, tmp_path):
        assert load_checkpoint(given).config.vocab_size == RandomCheckpoint().config.vocab_size


@pytest.mark.slow
def test_a_pickle_is_refused_with_a_command_that_converts_it(folder):
    for shard in folder.glob("model*"):
        shard.unlink()
    torch.save(transformers.LlamaForCausalLM(CONFIG).state_dict(), folder / "pytorch_model.bin")
    subprocess.run(told_command(refusal(folder)), cwd=folder, check=True, capture_output=True)
    load_model(folder)


def test_a_folder_without_a_tokenizer_leads_to_one(folder):
    (folder / "tokenizer.json").unlink()
    sentence = refusal(folder)
    assert sentence.startswith(f"{folder} has no tokenizer.json: make one in its folder, python -c ")
    assert 'AutoTokenizer as A; A.from_pretrained(".").save_pretrained(".")' in told_command(sentence)[-1]


def resolve(name, tmp_path, **options):
    return resolve_model(name, cache_dir=tmp_path, on_progress=print, options=FetchOptions(**options))


@pytest.mark.parametrize(
    "address", ["https://huggingface.co/org/name", "huggingface.co/org/name/tree/main", "https://hf.co/org/name?x"]
)
def test_an_address_of_the_hub_leads_to_its_name(address, tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"is an address: give the name of its model, org/name$"):
        resolve(address, tmp_path)


def test_a_mistyped_path_is_no_fault_of_the_network(tmp_path):
    with pytest.raises(HubUnreachableError) as caught:
        resolve("m/nosuch", tmp_path, endpoint="http://127.0.0.1:9")
    assert str(caught.value).startswith(
        "there is no folder m/nosuch here; as a name of the hub: http://127.0.0.1:9 gave no usable answer"
    )
