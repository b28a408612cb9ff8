"""`instructor`."""

from typing import Literal

import instructor
from checks import BASE_URL, MODEL, PROMPT, report, require_city
from openai import OpenAI
from pydantic import BaseModel

messages = [{"role": "user", "content": PROMPT}]


class Weather(BaseModel):
    city: Literal["Paris", "Oslo"]


def city(mode: instructor.Mode) -> str:
    client = instructor.from_openai(OpenAI(base_url=BASE_URL, api_key="any", max_retries=0), mode=mode)
    made = client.chat.completions.create(model=MODEL, messages=messages, response_model=Weather, max_retries=0)
    return made.city


def tool_calls() -> None:
    require_city(city(instructor.Mode.TOOLS))


def structured() -> None:
    require_city(city(instructor.Mode.JSON_SCHEMA))


report("instructor", tool_calls, structured)
