"""Prompts whose answers copy from them, and prompts whose answers do not."""

from collections.abc import Mapping
from enum import StrEnum

_HARBOUR = (
    "The harbour of Lisse was built in 1743 by fishermen who had lost their boats in the great storm. It has two stone"
    " piers, a small lighthouse, and a market where eels and herring are sold before sunrise. In 1911 the railway came,"
    " and most of the fish went to the cities by train. Today the piers are used by sailing boats, and the market is"
    " open on Saturdays only."
)
_GARDEN = (
    "Tomatoes need six hours of sun, deep soil and regular water. Plant them after the last frost, half a metre apart,"
    " and tie them to a stake as they grow. Pinch out the side shoots every week. Pick the fruit when it is red all"
    " over and comes off with a light twist. Green fruit ripens on a window sill within two weeks."
)
_LETTER = (
    "Dear Mrs Keller, the delivery of forty chairs and ten tables that we had agreed for Monday will arrive on Thursday"
    " morning. Our driver will call you an hour before. Please have the loading gate open by eight o'clock and keep two"
    " parking places free. We are sorry for the delay and will not charge you for the transport. Yours, Anna Roth"
)
_FILTERS = """def below(values, limit):
    result = []
    for value in values:
        if value < limit:
            result.append(value)
    return result


def above(values, limit):
    result = []
    for value in values:
        if value > limit:
            result.append(value)
    return result
"""
_ACCOUNT = """class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        self.balance = self.balance + amount
        return self.balance

    def withdraw(self, amount):
        self.balance = self.balance - amount
        return self.balance
"""
_STOCK = """class Stock:
    def __init__(self):
        self.items = {}

    def add(self, name, count):
        self.items[name] = self.items.get(name, 0) + count

    def remove(self, name, count):
        if self.items.get(name, 0) < count:
            raise ValueError(name)
        self.items[name] = self.items[name] - count

    def count(self, name):
        return self.items.get(name, 0)
"""
_DEGREES = """def celsius(fahrenheit):
    return (fahrenheit - 32) * 5 / 9


def fahrenheit(celsius):
    return celsius * 9 / 5 + 32


def main():
    for degrees in range(0, 100, 10):
        print(degrees, celsius(degrees), fahrenheit(degrees))


main()
"""
_SHAPES = """function area(shape) {
  if (shape.kind === "circle") {
    return Math.PI * shape.radius * shape.radius;
  }
  if (shape.kind === "square") {
    return shape.side * shape.side;
  }
  return 0;
}
"""


class Kind(StrEnum):
    """What is asked for."""

    SUMMARISE = "summarise"
    EDIT = "edit"
    CODE_EDIT = "code edit"
    NEW_CODE = "new code"
    CHAT = "chat"


PROMPTS: Mapping[Kind, tuple[str, ...]] = {
    Kind.SUMMARISE: tuple(
        f"Summarise this text with the most important sentences of it:\n\n{text}"
        for text in (_HARBOUR, _GARDEN, _LETTER)
    ),
    Kind.EDIT: tuple(
        f"{wish} Give me the whole text again.\n\n{text}"
        for wish, text in (
            ("Replace Lisse by Marne in this text.", _HARBOUR),
            ("Replace tomatoes by peppers in this text.", _GARDEN),
            ("Replace Thursday by Friday in this letter.", _LETTER),
        )
    ),
    # A small model corrects code by writing it again with a check more. What the next three ask for it answers with
    # code of its own: they are kept as that.
    Kind.CODE_EDIT: tuple(
        f"Correct the mistakes in this code, if there are any, and show me the whole code:\n\n```\n{code}```"
        for code in (_ACCOUNT, _STOCK, _DEGREES)
    ),
    Kind.NEW_CODE: tuple(
        f"{wish} Write the whole code again.\n\n```\n{code}```"
        for wish, code in (
            ("Add a docstring to each function.", _FILTERS),
            ("Rename the field balance to total.", _ACCOUNT),
            ("Rename the function to areaOf.", _SHAPES),
        )
    ),
    Kind.CHAT: (
        "Why is the sky blue? Explain it to a child.",
        "What should I see in Rome in two days?",
        "Tell me a short story about a fox who is afraid of the dark.",
    ),
}
