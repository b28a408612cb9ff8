"""`langchain-openai`."""

import asyncio
from typing import Literal

from checks import BASE_URL, MAX_TOKENS, MODEL, PROMPT, report, require_city, require_equal
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

model = ChatOpenAI(base_url=BASE_URL, api_key="any", model=MODEL, max_retries=0, temperature=0, max_tokens=MAX_TOKENS)
caller = model.model_copy(update={"max_tokens": None})


class weather(BaseModel):  # noqa: N801  (the tool's name)
    """Of a city."""

    city: Literal["Paris", "Oslo"]


def chat() -> None:
    require_equal(model.invoke(PROMPT).usage_metadata["output_tokens"], MAX_TOKENS)


def stream() -> None:
    require_equal("".join(chunk.content for chunk in model.stream(PROMPT)), model.invoke(PROMPT).content)


def tool_calls() -> None:
    bound = caller.bind_tools([weather], tool_choice="required", strict=True)
    made = bound.invoke(PROMPT)
    require_city(made.tool_calls[0]["args"]["city"])
    answers = [ToolMessage("It rains.", tool_call_id=call["id"]) for call in made.tool_calls]
    turns = [HumanMessage(PROMPT), made, *answers]
    require_equal(model.invoke(turns).usage_metadata["output_tokens"], MAX_TOKENS)


def tool_calls_streamed() -> None:
    bound = caller.bind_tools([weather], tool_choice="required", strict=True)
    first, *rest = bound.stream(PROMPT)
    for chunk in rest:
        first += chunk
    require_city(first.tool_calls[0]["args"]["city"])


def structured() -> None:
    for method in ("json_schema", "function_calling"):
        require_city(caller.with_structured_output(weather, method=method, strict=True).invoke(PROMPT).city)


def events() -> None:
    async def text() -> str:
        told = [event async for event in model.astream_events(PROMPT)]
        return "".join(event["data"]["chunk"].content for event in told if event["event"] == "on_chat_model_stream")

    require_equal(asyncio.run(text()), model.invoke(PROMPT).content)


report("langchain-openai", chat, stream, tool_calls, tool_calls_streamed, structured, events)
