"""`litellm`."""

import json

import litellm
from checks import BASE_URL, MAX_TOKENS, MODEL, PROMPT, SCHEMA, TOOL, report, require_city, require_equal

messages = [{"role": "user", "content": PROMPT}]
tools = [{"type": "function", "function": TOOL}]
to = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": "any", "messages": messages, "temperature": 0}


def chat() -> None:
    require_equal(litellm.completion(**to, max_tokens=MAX_TOKENS).usage.completion_tokens, MAX_TOKENS)


def stream() -> None:
    told = litellm.completion(**to, max_tokens=MAX_TOKENS, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in told)
    require_equal(text, litellm.completion(**to, max_tokens=MAX_TOKENS).choices[0].message.content)


def tool_calls() -> None:
    made = litellm.completion(**to, tools=tools, tool_choice="required").choices[0]
    require_equal(made.finish_reason, "tool_calls")
    require_city(json.loads(made.message.tool_calls[0].function.arguments)["city"])


def tool_calls_streamed() -> None:
    chunks = list(litellm.completion(**to, tools=tools, tool_choice="required", stream=True))
    made = litellm.stream_chunk_builder(chunks, messages=messages).choices[0]
    require_equal(made.finish_reason, "tool_calls")
    require_city(json.loads(made.message.tool_calls[0].function.arguments)["city"])


def structured() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    made = litellm.completion(**to, response_format=form)
    require_city(json.loads(made.choices[0].message.content)["city"])


report("litellm", chat, stream, tool_calls, tool_calls_streamed, structured)
