"""`llm`, by the class that its extra-openai-models.yaml makes."""

import json

import llm
from checks import BASE_URL, MAX_TOKENS, MODEL, PROMPT, SCHEMA, report, require_city, require_equal
from llm.default_plugins.openai_models import Chat

model = Chat(MODEL, model_name=MODEL, api_base=BASE_URL, supports_tools=True, supports_schema=True)
model.key = "any"


def weather(city: str) -> str:
    """Of a city."""
    return f"It rains in {city}."


def chat() -> None:
    response = model.prompt(PROMPT, stream=False, max_tokens=MAX_TOKENS, temperature=0)
    require_equal(response.text(), response.text())
    require_equal(response.usage().output, MAX_TOKENS)


def stream() -> None:
    whole = model.prompt(PROMPT, stream=False, max_tokens=MAX_TOKENS, temperature=0).text()
    require_equal("".join(model.prompt(PROMPT, stream=True, max_tokens=MAX_TOKENS, temperature=0)), whole)


def tools_shown() -> None:
    """It cannot require a call, and a random model makes none."""
    tool = llm.Tool.function(weather)
    response = model.prompt(PROMPT, tools=[tool], stream=True, max_tokens=MAX_TOKENS, temperature=0)
    response.text()
    require_equal(response.usage().output, MAX_TOKENS)


def structured() -> None:
    require_city(json.loads(model.prompt(PROMPT, schema=SCHEMA, stream=False, temperature=0).text())["city"])


report("llm", chat, stream, tools_shown, structured)
