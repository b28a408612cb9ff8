"""`pydantic-ai`."""

import asyncio
from typing import Literal

from checks import BASE_URL, MAX_TOKENS, MODEL, PROMPT, report, require_city, require_equal
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key="any"))
settings = {"max_tokens": MAX_TOKENS, "temperature": 0.0}


class Weather(BaseModel):
    city: Literal["Paris", "Oslo"]


def chat() -> None:
    require_equal(Agent(model).run_sync(PROMPT, model_settings=settings).usage.output_tokens, MAX_TOKENS)


def stream() -> None:
    async def text() -> str:
        async with Agent(model).run_stream(PROMPT, model_settings=settings) as told:
            return await told.get_output()

    require_equal(asyncio.run(text()), Agent(model).run_sync(PROMPT, model_settings=settings).output)


def tool_calls() -> None:
    require_city(Agent(model, output_type=ToolOutput(Weather)).run_sync(PROMPT).output.city)


def structured() -> None:
    require_city(Agent(model, output_type=NativeOutput(Weather)).run_sync(PROMPT).output.city)


report("pydantic-ai-slim", chat, stream, tool_calls, structured)
