"""Every metric of real processes moves when its subject does."""

import asyncio
import itertools
from contextlib import AsyncExitStack
from urllib.request import urlopen

import grpc.aio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.v1.executor_pb2 import ProfileRequest
from paceline.v1.executor_pb2_grpc import ExecutorServiceStub
from paceline_client import AsyncClient, JsonSchema, Sampling, Stopping
from paceline_client.errors import PacelineError
from service_processes.logged import SchedulerTestProcess
from service_processes.measured import event, module_process

PORTS = ("--port", "0", "--health-port", "0", "--metrics-port", "0")
SMALL = ("--max-num-seqs", "8", "--max-model-len", "512", "--kv-cache-memory", "2MiB")
CONSTANT = {"cache_config_info", "executor_info", "executor_ranks", "executor_weight_bytes"}
CONSTANT |= {"executor_kv_blocks", "executor_kv_cache_bytes", "executor_expert_load_ratio"}  # of a mixture
# What no client and no operator can do to a sound system; their own tests show them.
NOT_HERE = {"executor_refused_plans", "executor_failed_steps", "executor_failed_forms"}
FORM = {"type": "object", "properties": {"harbour_of_the_fishermen": {"enum": [1743]}}, "additionalProperties": False}
FORM["required"] = list(FORM["properties"])
LARGE_FORMS = ({"enum": list(range(first, first + 4000))} for first in itertools.count())
LETTER = "The harbour was built in 1743 by fishermen who had lost their boats in the great storm. "


class Scraped:
    """What the metrics ports of processes said, again and again."""

    def __init__(self):
        self.seen = {}  # by family: all that was read

    async def look(self, *ports):
        families = {}
        for port in ports:
            for family in text_string_to_metric_families(await asyncio.to_thread(read, port)):
                if family.name.startswith("paceline_"):
                    name = family.name.removeprefix("paceline_")
                    samples = ((s.name, *sorted(s.labels.items()), s.value) for s in family.samples)
                    families[name] = frozenset(samples)
        for name, samples in families.items():
            self.seen.setdefault(name, set()).add(samples)
        return families

    def unmoved(self):
        return {name for name, values in self.seen.items() if len(values) < 2}


def read(port):
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def value(families, name, **labels):
    """The sum over what has these labels."""
    return sum(each[-1] for each in families[name] if labels.items() <= dict(each[1:-1]).items())


async def ask(target, text, most, **others):
    async with AsyncClient(target) as client:
        stopping = Stopping(max_tokens=most, ignore_eos="structured" not in others)
        return await client.generate(text, stopping=stopping, sampling=Sampling(temperature=0.0), **others)


async def load(target):
    """Short answers, which the scheduler learns from, copies, and then more long ones than there are blocks for."""
    await asyncio.gather(*(ask(target, f"{number} {LETTER}", 4) for number in range(24)))
    for _ in range(2):
        await ask(target, LETTER * 4, 60)
        await ask(target, LETTER, 60, structured=JsonSchema(FORM, compact=True))
    with pytest.raises(PacelineError):
        await ask(target, LETTER, 10_000)
    await asyncio.gather(*(ask(target, f"{LETTER * 2}{number}", 330, tenant=f"t-{number}") for number in range(6)))


async def keep_asking(target):
    """The client goes from one scheduler to the next."""
    while True:
        await ask(target, LETTER, 400)


async def test_every_metric_of_a_system_moves(tiny_model, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")  # spans are made, and nobody takes them
    scraped = Scraped()
    model = ("--model", str(tiny_model))
    async with AsyncExitStack() as stack:
        executor = await stack.enter_async_context(module_process("paceline_executor", *model, *PORTS, *SMALL))
        served = await event(executor, "ready")
        await scraped.look(served["metrics_port"])
        options = ("--executors", f"127.0.0.1:{served['port']}", "--log-requests", "1")
        first = await SchedulerTestProcess.start(*options)
        stack.push_async_callback(first.stop)
        ready = await first.event("ready")
        target, ports = f"127.0.0.1:{ready['port']}", (ready["metrics_port"], served["metrics_port"])
        await scraped.look(*ports)

        loading = asyncio.create_task(load(target))
        while not loading.done():
            await scraped.look(*ports)
            await asyncio.sleep(0.05)
        await loading
        await asyncio.gather(profile(served["port"]), ask(target, LETTER, 200))
        while not value(families := await scraped.look(*ports), "executor_waiting_forms"):
            await ask(target, LETTER, 2, structured=JsonSchema(next(LARGE_FORMS)))
        assert value(families, "num_preemptions") > 0
        assert value(families, "prefix_cache_hits") > 0
        assert value(families, "admission_rejections") == 1
        accepted = value(families, "spec_decode_num_accepted_tokens")
        assert 0 < accepted == value(families, "executor_accepted_draft_tokens")
        assert accepted == value(families, "spec_decode_num_accepted_tokens_per_pos")

        first.clog_log()
        while not value(await scraped.look(*ports), "log_lines_lost"):
            await asyncio.gather(*(ask(target, LETTER, 1) for _ in range(64)))
        first.unclog_log()

        asking = [asyncio.create_task(keep_asking(target)) for _ in range(8)]
        second = await SchedulerTestProcess.start(*options, "--takeover")
        stack.push_async_callback(second.stop)
        ready = await second.event("ready")
        ports = (ready["metrics_port"], served["metrics_port"])
        while not value(families := await scraped.look(*ports), "recovery_pause_seconds", kind="scheduler"):
            await asyncio.sleep(0.05)
        assert value(families, "recoveries", kind="scheduler") == 1
        for each in asking:
            each.cancel()
        executor.kill()
        while not value(await scraped.look(ports[0]), "executors", state="lost"):
            await asyncio.sleep(0.05)
    assert scraped.unmoved() == CONSTANT | NOT_HERE


async def profile(port):
    """Six steps."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        async for _ in ExecutorServiceStub(channel).Profile(ProfileRequest(num_steps=6)):
            pass
