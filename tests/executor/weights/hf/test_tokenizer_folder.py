"""A Hugging Face folder's tokenizer is taken as its files state it, and a damaged file is named."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from paceline_executor.errors import ModelCorruptError, UnsupportedModelError
from paceline_executor.weights import GenerationDefaults, load_checkpoint, load_model, load_tokenizer
from paceline_executor.weights.hf import tokenizer
from random_models import RandomCheckpoint, gguf_parts

SPECIAL = ["<s>", "<|eot_id|>", "<pad>"]


def small_tokenizer():
    """Words of single letters, and three special tokens."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate("abc")}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer


def write_folder(folder, tokenizer=None, template=None, **files):
    """A model folder: tokenizer.json, and each keyword as a JSON file of that name."""
    (folder / "tokenizer.json").write_text((tokenizer or small_tokenizer()).to_str())
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_a_folder_is_read_whole(tmp_path):
    bundle = load_tokenizer(
        write_folder(
            tmp_path,
            tokenizer_config={
                "bos_token": {"content": "<s>", "special": True},
                "eos_token": "<pad>",
                "pad_token": "<pad>",
                "chat_template": "{{ messages }}",
            },
            generation_config={"eos_token_id": [2, 5], "temperature": 0.6, "top_p": 0.9, "top_k": 40, "min_p": 0.1},
        )
    )
    assert (bundle.bos_token_id, bundle.eos_token_id) == (3, 5)
    assert bundle.end_token_ids == (5, 2, 4)
    assert dict(bundle.special_tokens) == {"bos_token": "<s>", "eos_token": "<pad>", "pad_token": "<pad>"}
    assert bundle.defaults == GenerationDefaults(temperature=0.6, top_p=0.9, top_k=40, min_p=0.1)
    assert bundle.chat_template == "{{ messages }}"
    assert Tokenizer.from_str(bundle.tokenizer_json.decode()).encode("a<s>").ids == [0, 3]


def test_how_a_model_marks_its_output_is_told_as_it_stands_in_its_files(tmp_path):
    template = {"start_anchor": "<é>", "fields": {"content": {}}}
    bundle = load_tokenizer(write_folder(tmp_path, tokenizer_config={"response_template": template}))
    assert json.loads(bundle.response_template) == template
    assert load_tokenizer(write_folder(tmp_path, tokenizer_config={})).response_template is None


def test_a_response_template_of_no_sensible_length_is_damaged(tmp_path):
    with pytest.raises(ModelCorruptError, match="response_template has 300002 characters"):
        load_tokenizer(write_folder(tmp_path, tokenizer_config={"response_template": "x" * 300_000}))


def test_a_folder_may_hold_its_weights_in_a_gguf_file(tmp_path):
    checkpoint = RandomCheckpoint()
    path = gguf_parts(checkpoint).write(tmp_path / "tiny.gguf")
    assert load_checkpoint(tmp_path).config == checkpoint.config
    assert load_tokenizer(tmp_path) == load_model(tmp_path)[1] == load_tokenizer(path)
    assert load_tokenizer(write_folder(tmp_path)) == load_model(tmp_path)[1] != load_tokenizer(path)


def test_a_lone_tokenizer_json_is_enough(tmp_path):
    bundle = load_tokenizer(write_folder(tmp_path))
    assert (bundle.bos_token_id, bundle.eos_token_id, bundle.chat_template) == (None, None, None)
    assert bundle.end_token_ids == (4,)
    assert bundle.prefix_token_ids == bundle.suffix_token_ids == ()
    assert bundle.defaults == GenerationDefaults()


def test_a_repetition_penalty_that_a_folder_recommends_is_a_default(tmp_path):
    """As Qwen2.5 comes."""
    write_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "repetition_penalty": 1.05, "min_p": null}')
    bundle = load_tokenizer(tmp_path)
    assert bundle.defaults == GenerationDefaults(repetition_penalty=1.05)


def test_a_tokenizer_that_would_end_the_process_is_refused_with_a_sentence(tmp_path, monkeypatch):
    """Of every l a thousand, of each of these a thousand, and so on: the library ends a process that lacks memory."""
    fields = json.loads(small_tokenizer().to_str())
    grows = {"type": "Replace", "pattern": {"String": "l"}, "content": "l" * 1000}
    fields["normalizer"] = {"type": "Sequence", "normalizers": [grows] * 5}
    write_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    monkeypatch.setattr(tokenizer, "_TRIAL_BYTES", 256 << 20)
    with pytest.raises(ModelCorruptError, match=r"tokenizer\.json.*cannot read it within 60 s and 256 MiB"):
        load_tokenizer(tmp_path)


def test_a_folder_encodes_as_transformers_does(tmp_path):
    from transformers import AutoTokenizer

    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|eot_id|>"}
    bundle = load_tokenizer(write_folder(tmp_path, tokenizer_config=config))
    oracle = AutoTokenizer.from_pretrained(str(tmp_path))
    text = "<s>abc cab<|eot_id|>"
    ids = Tokenizer.from_str(bundle.tokenizer_json.decode()).encode(text, add_special_tokens=False).ids
    assert ids == oracle.encode(text, add_special_tokens=False)
    assert (bundle.bos_token_id, bundle.eos_token_id) == (oracle.bos_token_id, oracle.eos_token_id)


def test_the_template_file_goes_before_the_configuration(tmp_path):
    config = {"chat_template": "old"}
    assert load_tokenizer(write_folder(tmp_path, template="new", tokenizer_config=config)).chat_template == "new"


NAMED = [{"name": name, "template": name[0]} for name in ("rag", "default", "tool_use")]


@pytest.mark.parametrize(
    ("template", "files", "config"),
    [
        (None, {}, "old"),
        (None, {}, NAMED[:2]),
        (None, {}, NAMED),
        ("new", {}, NAMED),
        ("new", {"tool_use": "tools"}, None),
        ("new", {"tool_use": "tools", "rag": "r"}, "old"),
        ("new", {"rag": "r"}, NAMED),
    ],
)
def test_of_several_templates_those_are_taken_that_transformers_takes(tmp_path, template, files, config):
    from transformers import AutoTokenizer

    configuration = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": config}
    folder = write_folder(tmp_path, template=template, tokenizer_config=configuration)
    (folder / "additional_chat_templates").mkdir()
    for name, text in files.items():
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(text)
    oracle = AutoTokenizer.from_pretrained(folder)
    bundle = load_tokenizer(folder)
    assert bundle.chat_template == oracle.get_chat_template()
    assert (bundle.tool_use_template or bundle.chat_template) == oracle.get_chat_template(tools=[])


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"neither a model\.safetensors nor a GGUF file"):
        load_tokenizer(tmp_path)


def test_a_folder_with_several_models_is_refused(tmp_path):
    for name in ("small.gguf", "large.gguf"):
        gguf_parts(RandomCheckpoint()).write(tmp_path / name)
    with pytest.raises(UnsupportedModelError, match=r"2 GGUF files, large\.gguf the first; give the path of one"):
        load_checkpoint(tmp_path)


BROKEN = {
    "tokenizer.json": [b"", b"{", b"[]", b'{"version": "1.0"}', b"\xff\xfe"],
    "tokenizer_config.json": [
        b"{",
        b"[1]",
        b"[" * 100_000,
        b'{"eos_token": 7}',
        b'{"chat_template": 3}',
    ],
    "generation_config.json": [
        b'{"temperature": "hot"}',
        b'{"temperature": -1}',
        b'{"temperature": NaN}',
        b'{"top_p": 1.5}',
        b'{"min_p": 1.5}',
        b'{"repetition_penalty": "1.1"}',
        b'{"repetition_penalty": 0}',
        b'{"repetition_penalty": 10.5}',
        b'{"top_k": 1' + b"0" * 400 + b"}",
        b'{"eos_token_id": [1, "2"]}',
        b'{"eos_token_id": -1}',
    ],
    "chat_template.jinja": [b"\xff"],
}


@pytest.mark.parametrize(
    ("name", "content"), [(name, content) for name, contents in BROKEN.items() for content in contents]
)
def test_a_broken_file_is_named(tmp_path, name, content):
    write_folder(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelCorruptError, match=name) as refusal:
        load_tokenizer(tmp_path)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 400 + len(str(tmp_path))
