"""`openai-agents`, which calls `/v1/responses`."""

from typing import Literal

from agents import (
    Agent,
    ModelBehaviorError,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import BASE_URL, MAX_TOKENS, MODEL, PROMPT, report, require_city, require_equal
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
model = OpenAIResponsesModel(MODEL, AsyncOpenAI(base_url=BASE_URL, api_key="any", max_retries=0))
asked: list[str] = []


class Weather(BaseModel):
    city: Literal["Paris", "Oslo"]


@function_tool
def weather(city: Literal["Paris", "Oslo"]) -> str:
    """Of a city."""
    asked.append(city)
    return "It rains."


def cut_output() -> None:
    """It takes one for an error, and says why."""
    agent = Agent("a", model=model, model_settings=ModelSettings(max_tokens=MAX_TOKENS))
    try:
        Runner.run_sync(agent, PROMPT)
    except ModelBehaviorError as error:
        require_equal("max_output_tokens" in str(error), True)
    else:
        raise ValueError("it was taken for whole")


def tool_calls() -> None:
    settings = ModelSettings(tool_choice="required", max_tokens=400)
    agent = Agent("a", model=model, model_settings=settings, tools=[weather], tool_use_behavior="stop_on_first_tool")
    require_equal(Runner.run_sync(agent, PROMPT).final_output, "It rains.")
    require_city(asked[0])


def structured() -> None:
    require_city(Runner.run_sync(Agent("a", model=model, output_type=Weather), PROMPT).final_output.city)


report("openai-agents", cut_output, tool_calls, structured)
