"""Texts that are validated with: out of files as users have them, and prose."""

import json
import os
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from paceline_executor.errors import ProbeTextError
from paceline_executor.start.opening import simulated_tokenizer
from paceline_executor.validation.texts import Probe, prose, read_probes, windows

BYTES = simulated_tokenizer()  # a token per byte
NOW = datetime(2026, 1, 2, tzinfo=UTC)
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]}


def written(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@given(st.lists(st.text("ab", max_size=30), max_size=5), st.integers(2, 7), st.integers(1, 60))
def test_windows_hold_the_first_tokens_once_and_in_order(texts, size, most):
    found = windows([Probe("here", text) for text in texts], BYTES, size, most, NOW)
    assert bytes(token for window in found for token in window) == "".join(texts).encode()[:most]
    assert all(0 < len(window) <= size for window in found)


def test_windows_begin_as_the_model_wants_texts_to_begin():
    found = windows([Probe("here", "abcdef")], replace(BYTES, prefix_token_ids=(257,)), 4, 100, NOW)
    assert found == [(257, *b"abc"), (257, *b"def")]


def test_the_prose_is_sentences_each_paragraph_once():
    (probe,) = prose()
    paragraphs = probe.text.split("\n\n")
    assert len(paragraphs) == len(set(paragraphs)) > 500
    assert all(paragraph.endswith(".") and paragraph[0].isupper() for paragraph in paragraphs)
    assert not any("\n" in paragraph or "::=" in paragraph or "***" in paragraph for paragraph in paragraphs)
    assert len(probe.text) > 30_000 * 4


def test_a_text_is_one_probe_and_json_lines_are_one_each(tmp_path):
    text = "\ufeffOne line.\n{not JSON}\n"
    assert [probe.text for probe in read_probes(written(tmp_path / "a.txt", text))] == [text[1:]]
    lines = f"\n{json.dumps({'text': 'one', 'other': 1})}\r\n\n{json.dumps(CHAT)}"
    one, chat = read_probes(written(tmp_path / "a.jsonl", lines))
    assert (one.text, chat.text, list(chat.messages)) == ("one", None, CHAT["messages"])


def test_chats_are_what_the_models_template_makes_of_them():
    (window,) = windows([Probe("here", None, tuple(CHAT["messages"]))], BYTES, 100, 100, NOW)
    text = Tokenizer.from_str(BYTES.tokenizer_json.decode()).decode(list(window), skip_special_tokens=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('no system messages') }}", "line 1: .*no system messages"),
        ("{% for %}", "line 1: .*TemplateSyntaxError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
    ],
)
def test_a_template_that_does_not_take_a_chat_is_a_sentence(template, message):
    with pytest.raises(ProbeTextError, match=message):
        windows([Probe("line 1", None, tuple(CHAT["messages"]))], replace(BYTES, chat_template=template), 100, 100, NOW)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "not UTF-8 at byte 0"),
        ('{"text": "a"}\n{"text": ', "line 2 of .* is not JSON such as"),
        ('{"text": 5}', "line 1"),
        ('{"text": ["a"]}', "line 1"),
        ('{"text": "\\ud800"}', "line 1"),
        ('{"other": "a"}', "line 1"),
        ('{"messages": "abc"}', "line 1"),
        ('{"messages": [{"role": "user"}]}', "line 1"),
        ('{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "line 1"),
        ('{"text": "a"}\n[1]', "line 2"),
        ('{"text": ' + "[" * 100_000, "line 1"),
        ('{"text": ' + "9" * 5_000 + "}", "line 1"),
    ],
)
def test_a_file_that_is_neither_is_refused_by_line(tmp_path, content, message):
    with pytest.raises(ProbeTextError, match=message):
        read_probes(written(tmp_path / "data", content))


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path / "nothing", tmp_path):
        with pytest.raises(ProbeTextError, match=f"cannot read {path}"):
            read_probes(path)


def test_a_file_that_is_too_large_is_refused(tmp_path):
    with (tmp_path / "large").open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(ProbeTextError, match=r"cannot read .*large"):
        read_probes(tmp_path / "large")
