"""`make page`: the page in a real browser, before a real system; what it looks like goes to `dist/page`.

Playwright and axe-core are not among what the tests need: the Makefile puts both beside the environment.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from page_check.system import System, running_system

SHOTS = Path("dist/page")
WIDTHS = {"narrow": (360, 740), "wide": (1280, 800)}
THEMES = ("light", "dark")
NUM_TOKENS = 10_000
MARKUP = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">"


def event(delta: dict[str, Any], reason: str | None = None) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta, 'finish_reason': reason}]})}\n\n"


CALL = {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": ""}}
SCRIPTED = (
    event({"role": "assistant", "reasoning_content": "They want the weather.\nSo I ask a tool."})
    + event({"content": f"Markup stays text: {MARKUP}\n\nIt's a second paragraph, of words that wrap at any width."})
    + event({"tool_calls": [CALL]})
    + event({"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "Oslo"}'}}]})
    + event({}, "tool_calls")
    + 'data: {"choices": [], "usage": {"completion_tokens": 42}}\n\ndata: [DONE]\n\n'
)


class Visit:
    """A browser's page of its own, and what was the matter with it."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.troubles: list[str] = []
        page.on("pageerror", lambda error: self.troubles.append(str(error)))
        page.on("request", lambda sent: self.troubles.extend([] if sent.url.startswith(url) else [sent.url]))
        page.goto(url)
        self.until("document.querySelector('#model').length > 0")
        self.until("document.querySelector('polyline').getAttribute('points')?.split(' ').length > 1")

    def until(self, expression: str, seconds: float = 30) -> None:
        """The page's policy lets nobody wait by a string of script inside of it."""
        for _ in range(int(seconds * 20)):
            if self.page.evaluate(expression):
                return
            self.page.wait_for_timeout(50)
        raise TimeoutError(expression)

    def ask(self, text: str, max_tokens: int | None = None) -> None:
        self.page.fill("#max-tokens", "" if max_tokens is None else str(max_tokens))
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def until_answered(self, seconds: float = 30) -> None:
        self.page.wait_for_selector("article.assistant:last-child[aria-busy=false]", timeout=seconds * 1000)

    def script_answers(self, body: str, status: int = 200) -> None:
        kind = "text/event-stream" if status == 200 else "application/json"
        self.page.route("**/chat/completions", lambda route: route.fulfill(status=status, content_type=kind, body=body))

    @property
    def told(self) -> str:
        return str(self.page.inner_text("article.assistant:last-child"))


def check(what: str, is_so: bool, told: object = "") -> None:
    print(f"{'ok  ' if is_so else 'FAIL'} {what} {told}", flush=True)
    if not is_so:
        FAILURES.append(what)


FAILURES: list[str] = []


def look(visit: Visit, name: str, axe: str) -> None:
    """A screenshot, and what axe-core finds."""
    page = visit.page
    page.screenshot(path=SHOTS / f"{name}.png")
    page.evaluate(axe)
    found = page.evaluate("axe.run()")["violations"]
    lines = [f"{one['id']}: {node['html'][:120]} {node['any'][:1]}" for one in found for node in one["nodes"]]
    check(f"axe finds nothing: {name}", not found, "\n".join(lines))
    is_narrow = page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    check(f"nothing is wider than the window: {name}", bool(is_narrow))


def look_at_all(visit: Visit, where: str, axe: str) -> None:
    """Four states: before a question, in the middle of an answer, after one with all parts, after refusals."""
    page = visit.page
    look(visit, f"{where}-1-empty", axe)
    visit.ask("Tell me something long.", 4000)
    visit.until("document.querySelector('article.assistant .text').textContent.length > 400")
    look(visit, f"{where}-2-streaming", axe)
    page.keyboard.press("Escape")
    visit.until_answered()
    page.click("#clear")
    visit.script_answers(SCRIPTED)
    visit.ask("What is the weather in Oslo?")
    visit.until_answered()
    page.click("details.reasoning summary")
    page.click("article.assistant details:last-child summary")
    look(visit, f"{where}-3-answered", axe)
    page.click("#clear")
    message = "this model's maximum context length is 2048 tokens; the prompt has 4096"
    visit.script_answers(json.dumps({"error": {"message": message}}), 400)
    refusal = json.dumps({"error": {"message": "the token is unknown"}})
    page.route("**/fleet", lambda route: route.fulfill(status=401, content_type="application/json", body=refusal))
    visit.ask("Too long")
    visit.until_answered()
    page.wait_for_selector("#fleet-trouble:not([hidden])")
    look(visit, f"{where}-4-refused", axe)


def check_markup(visit: Visit) -> None:
    visit.script_answers(SCRIPTED)
    visit.ask("What is the weather in Oslo?")
    visit.until_answered()
    check("markup in output stays text", MARKUP in visit.told and visit.page.title() == "Paceline")
    check("the call is shown whole", 'weather({"city": "Oslo"})' in visit.told)
    check("reasoning is folded", visit.page.get_attribute("details.reasoning", "open") is None)
    visit.page.unroute_all()


def longest_tasks_ms(trace: bytes) -> tuple[float, float]:
    """Of the pages' main threads, by the CPU and by the clock, which counts those who want the same cores, too."""
    events = json.loads(trace)["traceEvents"]
    mains = {
        (one["pid"], one["tid"])
        for one in events
        if one["name"] == "thread_name" and one["args"]["name"] == "CrRendererMain"
    }
    tasks = [one for one in events if one["ph"] == "X" and (one["pid"], one["tid"]) in mains]
    return max(one.get("tdur", 0) for one in tasks) / 1000, max(one.get("dur", 0) for one in tasks) / 1000


def check_long(visit: Visit, browser: Browser) -> None:
    browser.start_tracing(page=visit.page, categories=["toplevel", "__metadata"])
    visit.ask("Tell me everything.", NUM_TOKENS)
    visit.until_answered(300)
    check(
        f"{NUM_TOKENS} tokens came", f"{NUM_TOKENS} tokens" in visit.told, visit.page.inner_text(".figures >> nth=-1")
    )
    by_cpu, by_clock = longest_tasks_ms(browser.stop_tracing())
    check(
        "no long task of 50 ms", 0 < by_cpu < 50, f"the longest took {by_cpu:.1f} ms of CPU, {by_clock:.0f} ms in all"
    )


def check_faults(visit: Visit, system: System) -> None:
    page = visit.page
    page.click("#clear")
    visit.ask("Go on while the scheduler dies.", 2500)
    visit.until("document.querySelector('article.assistant:last-child .text').textContent.length > 200")
    check("both schedulers were killed", system.kill("paceline-scheduler") == 2)
    visit.until_answered(120)
    check("a stream outlives its schedulers", "2500 tokens" in visit.told, page.inner_text(".figures >> nth=-1"))
    page.click("#clear")
    visit.ask("Stop this.", 8000)
    visit.until("document.querySelector('article.assistant:last-child .text').textContent.length > 50")
    page.keyboard.press("Escape")
    visit.until_answered()
    check("Esc stops", "Stopped." in visit.told)
    page.context.set_offline(True)
    visit.ask("Nobody hears this.")
    visit.until_answered()
    check("a gateway that is gone is told", "cannot be reached" in visit.told)
    check("what was not answered can be sent again", page.input_value("#prompt") == "Nobody hears this.")
    page.context.set_offline(False)
    visit.ask("Are you back?", 5)
    visit.until_answered()
    check("it goes on when the network is back", "5 tokens" in visit.told)


def check_key(visit: Visit) -> None:
    page = visit.page
    page.fill("#key", "secret")
    page.press("#key", "Tab")
    kept = page.evaluate("[JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie]")
    check("the key is in sessionStorage only", kept == ['{"bearer":"secret"}', "{}", ""], kept)
    page.reload()
    check("the key outlives a reload", page.input_value("#key") == "secret")


@contextmanager
def visiting(browser: Browser, url: str, size: tuple[int, int] = (1280, 800), theme: str = "light") -> Iterator[Visit]:
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=theme)
    visit = Visit(context.new_page(), url)
    try:
        yield visit
    finally:
        check("nothing was thrown, nothing asked elsewhere", not visit.troubles, visit.troubles)
        context.close()


def main(axe_file: str) -> int:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("There is no chromium: apt-get install chromium", file=sys.stderr)
        return 1
    axe = Path(axe_file).read_text(encoding="utf-8")
    SHOTS.mkdir(parents=True, exist_ok=True)
    with running_system() as system, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        print(browser.version)
        for width, size in WIDTHS.items():
            for theme in THEMES:
                with visiting(browser, system.url, size, theme) as visit:
                    look_at_all(visit, f"{width}-{theme}", axe)
        with visiting(browser, system.url) as visit:
            check_markup(visit)
            check_key(visit)
        with visiting(browser, system.url) as visit:
            check_long(visit, browser)
            check_faults(visit, system)
        browser.close()
    print(f"{len(FAILURES)} failures; {SHOTS}")
    return 1 if FAILURES else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
