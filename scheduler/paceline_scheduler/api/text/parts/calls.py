"""Which reader a call has."""

from collections.abc import Mapping

from paceline_scheduler.api.text.parts.arguments import Arguments, LaxArguments, PairedArguments
from paceline_scheduler.api.text.parts.bound import BoundCall
from paceline_scheduler.api.text.parts.json_calls import JsonCalls
from paceline_scheduler.api.text.parts.reading import CallOutput, CallReader, NoCallError
from paceline_scheduler.api.text.parts.template import Body


def call_reader(
    call: BoundCall, out: CallOutput, opening: str, groups: Mapping[str, str], tools: Mapping[str, str]
) -> CallReader:
    """`opening` is the mark, without one the call is the whole turn. `tools` are their schemas by name. Raises
    NoCallError.
    """
    form = call.form
    if form.body in (Body.CALL, Body.CALLS):
        return JsonCalls(call, out, opening, None if opening else frozenset(tools))
    name = groups.get(form.name, "").strip()
    if not name or not name.isprintable():
        raise NoCallError
    if form.body is Body.PAIRS:
        return PairedArguments(call, out, opening, name, tools.get(name, ""))
    return (LaxArguments if call.quotes or form.has_bare_keys else Arguments)(call, out, opening, name)
