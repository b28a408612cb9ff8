"""`openai`, by which the others call, too."""

from typing import Literal

from checks import BASE_URL, MAX_TOKENS, MODEL, PROMPT, TOOL, report, require_city, require_equal
from openai import BadRequestError, OpenAI, pydantic_function_tool
from pydantic import BaseModel

client = OpenAI(base_url=BASE_URL, api_key="any", max_retries=0)
messages = [{"role": "user", "content": PROMPT}]
tools = [{"type": "function", "function": TOOL}]


class Weather(BaseModel):
    city: Literal["Paris", "Oslo"]


def text() -> str:
    asked = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=MAX_TOKENS, temperature=0)
    return asked.choices[0].message.content


def chat() -> None:
    require_equal(text(), text())


def stream() -> None:
    chunks = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    told = list(chunks)
    require_equal("".join(chunk.choices[0].delta.content or "" for chunk in told if chunk.choices), text())
    require_equal(told[-1].usage.completion_tokens, MAX_TOKENS)


def tool_calls() -> None:
    made = client.chat.completions.parse(
        model=MODEL, messages=messages, tools=[pydantic_function_tool(Weather, name="weather")], tool_choice="required"
    )
    require_equal(made.choices[0].finish_reason, "tool_calls")
    (call, *_) = made.choices[0].message.tool_calls
    require_city(call.function.parsed_arguments.city)
    answer = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
    turns = [*messages, made.choices[0].message, answer]
    said = client.chat.completions.create(model=MODEL, messages=turns, tools=tools, tool_choice="none", max_tokens=4)
    require_equal(said.usage.completion_tokens, 4)


def tool_calls_streamed() -> None:
    asked = client.chat.completions.stream(model=MODEL, messages=messages, tools=tools, tool_choice="required")
    with asked as events:
        done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
        final = events.get_final_completion()
    require_city(done[0].parsed_arguments["city"])
    require_equal(
        [each.arguments for each in done], [each.function.arguments for each in final.choices[0].message.tool_calls]
    )


def structured() -> None:
    made = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Weather)
    require_city(made.choices[0].message.parsed.city)


def log_probabilities() -> None:
    asked = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=4, logprobs=True, top_logprobs=2, temperature=0
    )
    told = asked.choices[0].logprobs.content
    require_equal([len(each.top_logprobs) for each in told], [2] * 4)
    require_equal([each.top_logprobs[0].bytes for each in told], [each.bytes for each in told])


def responses() -> None:
    flat = [{"type": "function", **TOOL}]
    with client.responses.stream(model=MODEL, input=PROMPT, tools=flat, tool_choice="required") as events:
        final = events.get_final_response()
    (call, *_) = [item for item in final.output if item.type == "function_call"]
    require_city(call.parsed_arguments["city"] if call.parsed_arguments else None)
    answer = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
    turns = [{"role": "user", "content": PROMPT}, call.to_dict(), answer]
    said = client.responses.create(model=MODEL, input=turns, tools=flat, tool_choice="none", max_output_tokens=4)
    require_equal(said.usage.output_tokens, 4)


def refusal() -> None:
    try:
        client.chat.completions.create(model=MODEL, messages=messages, tools=tools, tool_choice="no")
    except BadRequestError as error:
        require_equal(error.param, "tool_choice")
    else:
        raise ValueError("it was taken")


report("openai", chat, stream, tool_calls, tool_calls_streamed, structured, log_probabilities, responses, refusal)
