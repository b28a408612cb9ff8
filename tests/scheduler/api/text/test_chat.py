"""Chat templates: rendered as Hugging Face transformers does, and harmless whatever they contain."""

import asyncio
import contextlib
import os
import resource
from datetime import datetime
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from edge_rig.tokenizers import byte_level_tokenizer
from paceline.chat_template import ChatRefusedError, ChatTemplate, TemplateFailedError, UnreadError
from paceline_executor.weights import load_tokenizer
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.api.text.chat_renderer import ChatRenderers, TemplateSource
from paceline_scheduler.api.text.confined import Confinement
from paceline_scheduler.errors import InvalidRequestError, QueueFullError
from random_models import default_model_path

NOON = datetime(2026, 11, 21, 12, 0)  # noqa: DTZ001 (templates are told the local time)
CONVERSATION = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": ' What is "2 < 3"?  '},
    {"role": "assistant", "content": "True — ☃"},
    {"role": "user", "content": "<|im_end|>\n{{ messages }}"},
]
TEMPLATES = {
    # trim_blocks, lstrip_blocks, whitespace control and a name set inside the template
    "llama-2": """{% if messages[0]['role'] == 'system' %}
    {% set loop_messages = messages[1:] %}
    {% set system_message = messages[0]['content'] %}
{% else %}
    {% set loop_messages = messages %}
    {% set system_message = false %}
{% endif %}
{% for message in loop_messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if loop.index0 == 0 and system_message != false %}
        {% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
    {% else %}
        {% set content = message['content'] %}
    {% endif %}
    {% if message['role'] == 'user' %}
{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
{{ ' ' + content.strip() + ' ' + eos_token }}
    {% endif %}
{% endfor %}
""",
    # namespaces, filters, the date, tools that are none
    "llama-3.1": """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set ns = namespace(system="", count=0) %}
{%- for message in messages if message.role == "system" %}
    {%- set ns.system = ns.system ~ message.content | trim %}
{%- endfor %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + "\\n\\n" + ns.system + "<|eot_id|>" }}
{%- if tools is not none %}{{- tools | tojson }}{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{%- continue %}{%- endif %}
    {%- set ns.count = ns.count + 1 %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    # tojson with its options, macros, methods of strings and dictionaries, break, marked generations
    "tools-and-marks": """{%- macro turn(message) -%}
<|im_start|>{{ message.role | upper }}
{% generation %}{{ message.content }}{% endgeneration %}<|im_end|>
{% endmacro -%}
{%- for message in messages %}
    {{- turn(message) }}
    {{- message | tojson(indent=2, sort_keys=true) }}
    {%- for key, value in message.items() %}
        {%- if value.startswith("True") %}{%- break %}{%- endif %}
        {{- key.split("o")[-1] ~ "," ~ value.replace("☃", "*").rstrip() | length }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}
""",
}


# How families write calls, and what they read of a turn.
CALLING = {
    "qwen": """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string else "" %}
        {%- if '</think>' in message.content %}{%- set reasoning = message.content.split('</think>')[0] %}{%- endif %}
        {{- '<|im_start|>assistant\n<think>' + reasoning + '</think>' + message.content }}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>' + call.function.name }}
            {{- call.function.arguments | tojson + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
    {%- elif message.role == "tool" %}
        {{- '<tool_response>' + message.content + '</tool_response>' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}""",
    "llama": """{{ bos_token }}{% if not tools is defined %}{% set tools = none %}{% endif %}
{% for message in messages %}
    {% if 'tool_calls' in message %}
        {% if message.tool_calls | length != 1 %}{{ raise_exception("single tool-calls only") }}{% endif %}
        {% set call = message.tool_calls[0].function %}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
    {% else %}
<|{{ message.role }}|>{{ message.content | trim }}<|eot_id|>
    {% endif %}
    {% if loop.first and tools is not none %}{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}
{% endfor %}""",
    "mistral": """{{ bos_token }}
{%- for message in messages %}
    {%- if message.tool_calls is defined and message.tool_calls is not none %}[TOOL_CALLS][
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception("Tool call IDs should have length 9!") }}{%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
        {%- endfor %}]{{ eos_token }}
    {%- elif message.tool_call_id is defined %}[TOOL_RESULTS]{{ message.tool_call_id }} {{ message.content }}
    {%- else %}{{ message.role }}:{{ message.content }}
    {%- endif %}
{%- endfor %}{%- if tools is not none %}{{ tools | tojson }}{% endif %}""",
    # an empty content is an answer there, and gpt-oss calls the reasoning otherwise
    "deepseek": """{% for message in messages %}
{{ message.role }}{{ message.thinking }}
    {% if message['content'] is none %}{{ message.tool_calls[0]['function']['name'] }}{% endif %}
    {% if message['content'] is not none %}<|answer|>{{ message['content'] }}{% endif %}
{% endfor %}""",
    "asks-for-both": "{% for m in messages %}{{ m.content is none or m.content|length }}{{ m.tool_calls }}{% endfor %}"
    "{{ messages[1].content ~ '' if messages[1].content | length == 0 }}{{ tools }}",
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "<b> of a town",
            "parameters": {"type": "object", "properties": {"z": {"type": "string"}, "a": {"enum": ["é", None]}}},
        },
    }
]
CALL = {"type": "function", "id": "a1B2c3D4e", "function": {"name": "weather", "arguments": {"z": "Zürich", "a": 1.5}}}
CALLED = [
    CONVERSATION[1],
    {"role": "assistant", "content": "", "reasoning_content": "Ask.\n", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"t": 21}', "tool_call_id": "a1B2c3D4e", "name": "weather"},
    {"role": "assistant", "content": "21", "reasoning_content": "Hm."},
]

HELLO = [{"role": "user", "content": "hello"}]


class NoonDatetime(datetime):
    """The clock that transformers reads while a test compares with it."""

    @classmethod
    def now(cls, tz=None):
        """Noon."""
        return NOON


@pytest.fixture(scope="module")
def templates():
    """The templates above, and that of the default model."""
    return TEMPLATES | {"smollm2": load_tokenizer(default_model_path(os.environ)).chat_template}


@pytest.fixture
async def renderers():
    """Renderers with short limits."""
    limits = Confinement(max_work_s=0.5, max_bytes=256 * 1024 * 1024)
    renderers = ChatRenderers(EdgeLimits(), lambda: NOON, limits)
    yield renderers
    await renderers.close()


SPECIAL_TOKENS = (("bos_token", "<s>"), ("eos_token", "</s>"))


def render(renderers, template, messages=HELLO, max_chars=10_000, **variables):
    """Render a chat in the renderer's process."""
    conversation = {"messages": messages, "variables": variables}
    return renderers.render(TemplateSource(template, SPECIAL_TOKENS), conversation, max_chars)


def says(content):
    """A user's only turn."""
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("name", ["smollm2", *TEMPLATES])
@pytest.mark.parametrize("num_messages", [1, 2, 4])
def test_templates_render_as_in_transformers(templates, name, num_messages, monkeypatch):
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", NoonDatetime)
    messages = CONVERSATION[1:2] if num_messages == 1 else CONVERSATION[:num_messages]
    oracle = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_tokenizer(), bos_token="<s>", eos_token="</s>", chat_template=templates[name]
    )
    expected = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    template = ChatTemplate(templates[name], dict(SPECIAL_TOKENS))

    assert template.render(messages, NOON, max_chars=10_000) == expected


def by_transformers(template, messages, **options):
    """What apply_chat_template calls: that itself leaves out contents that are None."""
    rendered, _ = render_jinja_template([messages], chat_template=template, **dict(SPECIAL_TOKENS), **options)
    return rendered[0]


def rendered(template, messages, **variables):
    return ChatTemplate(template, dict(SPECIAL_TOKENS)).render(messages, NOON, 10_000, variables)


@pytest.mark.parametrize("name", CALLING)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["alone", "tools"])
def test_calls_and_reasoning_render_as_in_transformers(name, tools):
    template, shown = CALLING[name], CALLED
    if name == "deepseek":  # it shows no tools
        tools, shown = None, [CALLED[0], CALLED[1] | {"content": None}, *CALLED[2:]]
    options = {"tools": tools, "add_generation_prompt": False}

    assert rendered(template, CALLED, **options) == by_transformers(template, shown, **options)


def test_arguments_of_a_template_count_as_in_transformers():
    texts = [rendered(CALLING["qwen"], CALLED[:1], **given) for given in ({}, {"enable_thinking": False})]
    assert texts[1] == by_transformers(CALLING["qwen"], CALLED[:1], add_generation_prompt=True, enable_thinking=False)
    assert texts[1] == texts[0] + "<think></think>"


CONTINUED = {
    "kept": "{% for m in messages %}<s>{{ m.content }}</s>\n{% endfor %}",
    "trimmed": "{% for m in messages %}<s>{{ m.content | trim }}</s>\n{% endfor %}",
    "behind reasoning": "{% for m in messages %}<s>{{ m.thinking }}|{{ m.content }}</s>{% endfor %}",
}
CHANGED = {
    "left out": "{{ messages[0].content }}",
    "in capitals": "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
    "escaped": "{% for m in messages %}{{ m.content | tojson(ensure_ascii=true) }}{% endfor %}",
}


@pytest.mark.parametrize("name", CONTINUED)
@pytest.mark.parametrize("content", ["It is", "It is \n", "  It", ""])
def test_a_last_turn_goes_on_where_it_does_in_transformers(name, content):
    messages = [CONVERSATION[1], {"role": "assistant", "content": content, "reasoning_content": "Hm."}]
    text = rendered(CONTINUED[name], messages, add_generation_prompt=False, continue_final_message=True)
    assert text == by_transformers(CONTINUED[name], messages, continue_final_message=True)
    assert text.rstrip().endswith(content.strip())


@pytest.mark.parametrize("name", CHANGED)
def test_a_turn_that_a_template_changes_cannot_go_on(name):
    with pytest.raises(UnreadError, match="changes the last content") as caught:
        rendered(CHANGED[name], [CONVERSATION[1], {"role": "assistant", "content": "é"}], continue_final_message=True)
    assert caught.value.part == "continue_final_message"


def test_a_template_refuses_a_conversation_in_its_own_words():
    template = ChatTemplate(TEMPLATES["llama-2"], dict(SPECIAL_TOKENS))
    with pytest.raises(ChatRefusedError, match="roles must alternate"):
        template.render(CONVERSATION[2:3], NOON, max_chars=1000)


def test_a_missing_token_is_undefined_and_not_none():
    template = ChatTemplate("{{ bos_token }}x", {})
    assert template.render([], NOON, max_chars=10) == "x"


@pytest.mark.parametrize(
    "source",
    [
        "{% if",
        "{{ undefined_name.attribute }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['x'] }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ " + "(" * 10_000,
        "x" * 1001,
        "{{ 'x' * 1001 }}",
        " " * 2**20 + "x",
    ],
)
def test_a_template_that_fails_says_so(source):
    with pytest.raises(TemplateFailedError):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}], NOON, max_chars=1000)


async def test_a_chat_is_rendered_in_a_process_of_its_own(renderers):
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %} {{ strftime_now('%H') }}"
    )
    assert await render(renderers, template) == "<s>user: hello 12"
    assert await render(renderers, template, says("☃ \x00")) == "<s>user: ☃ \x00 12"


async def test_chats_at_the_same_time_get_their_own_answers(renderers):
    chats = [says(str(number)) for number in range(20)]
    texts = await asyncio.gather(*(render(renderers, "{{ messages[0].content }}", chat) for chat in chats))
    assert texts == [str(number) for number in range(20)]


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for a in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
        "{{ messages[0].content | center(10 ** 10) }}",
        "{{ (10 ** 10) ** (10 ** 8) }}",
        "{{ '\\ud800' }}",
    ],
    ids=["endless", "doubling", "wide", "endless-to-compile", "half-a-character"],
)
async def test_a_hostile_template_hurts_only_its_own_chat(renderers, template):
    hostile = asyncio.create_task(render(renderers, template))
    assert await render(renderers, "{{ messages[0].content }}") == "hello"
    with pytest.raises(InvalidRequestError) as caught:
        await hostile
    assert caught.value.field == "chat"
    assert await render(renderers, "{{ messages[0].content }}") == "hello"


async def test_a_template_that_failed_once_works_for_the_next_chat(renderers):
    template = "{% if messages[0].content == 'bad' %}{{ 'x' | center(10 ** 10) }}{% endif %}fine"
    with pytest.raises(InvalidRequestError):
        await render(renderers, template, says("bad"))
    assert await render(renderers, template) == "fine"


async def test_what_a_template_says_of_messages_is_cut_and_made_printable(renderers):
    with pytest.raises(InvalidRequestError) as caught:
        await render(renderers, "{{ raise_exception('\\ud800' ~ 'x' * 10000) }}")
    assert caught.value.field == "chat.messages"
    assert "?xxx" in caught.value.message
    assert len(caught.value.message) < 1000


async def test_a_process_that_died_meanwhile_is_replaced(renderers):
    """Nobody's chat fails for it."""
    template = "{{ messages[0].content }}"
    assert await render(renderers, template) == "hello"
    process = renderers._renderers[TemplateSource(template, SPECIAL_TOKENS)]._process._process
    process.kill()
    process.wait()
    assert await render(renderers, template) == "hello"


def num_files():
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_a_machine_out_of_descriptors_refuses_chats_for_a_while_and_loses_none(renderers):
    limit, at_most = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_before = num_files()
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_before + 100, at_most))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(4):
            with pytest.raises(QueueFullError, match="Too many open files"):
                await render(renderers, "{{ messages[0].content }}")
            os.close(taken.pop())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, at_most))
        for number in taken:
            os.close(number)
    await asyncio.sleep(0)  # closing takes a turn of the loop
    assert num_files() == num_before
    assert await render(renderers, "{{ messages[0].content }}") == "hello"


async def test_a_chat_whose_caller_goes_away_leaves_the_renderer_usable(renderers):
    """Its half-read answer is nobody else's."""
    for _ in range(3):
        abandoned = asyncio.create_task(render(renderers, "{{ messages[0].content }}", says("abandoned")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        abandoned.cancel()
        assert await render(renderers, "{{ messages[0].content }}") == "hello"


async def test_the_least_used_renderer_ends_when_there_are_too_many(renderers):
    for number in range(10):
        assert await render(renderers, f"{{{{ messages[0].content }}}}{number}") == f"hello{number}"
    assert len(renderers._renderers) == 8
    assert await render(renderers, "{{ messages[0].content }}0") == "hello0"


async def test_too_many_waiting_chats_are_refused():
    renderers = ChatRenderers(EdgeLimits(max_num_waiting_texts=1), lambda: NOON)
    first = asyncio.create_task(render(renderers, "{{ messages[0].content }}"))
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError) as caught:
        await render(renderers, "{{ messages[0].content }}")
    assert caught.value.retry_after_s > 0
    assert await first == "hello"
    await renderers.close()
