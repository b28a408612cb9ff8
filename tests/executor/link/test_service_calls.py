"""An executor's ports beside the plan stream: who it is, its rows, its tokenizer, health, reflection, drain."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from executor_rig.hash_executor import HASH_LIMITS, hash_executor, loaded
from executor_rig.hash_runner import HashRunner
from executor_rig.plan_client import attach_until, attached, column, grants, hello, info_of, request
from paceline.plan.codec.tokenizers import TokenizerParts
from paceline.plan.hashes import tokenizer_digest
from paceline.process.ports import PortError
from paceline.v1 import executor_pb2, executor_pb2_grpc, plan_pb2
from paceline_executor.errors import DeviceError, ModelCorruptError
from paceline_executor.link import servicer_views
from paceline_executor.link.service import ExecutorService, ServiceConfig

# On the twin `test_attach_order` and all of `rows` have a step's fates.
SEEN = ["seen", "hidden", pytest.param("twin", marks=pytest.mark.slow)]
pytestmark = [
    pytest.mark.usefixtures("seen_or_hidden"),
    pytest.mark.parametrize("seen_or_hidden", SEEN, indirect=True, scope="module"),
]

READY, NOT_READY = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE = "paceline.v1.ExecutorService"
LOOPBACK = ServiceConfig("127.0.0.1", 0, 0)


@asynccontextmanager
async def _stub(address, stub=executor_pb2_grpc.ExecutorServiceStub):
    async with grpc.aio.insecure_channel(address) as channel:
        yield stub(channel)


def _load():
    return loaded(HashRunner(HASH_LIMITS.num_blocks, HASH_LIMITS.block_size, HASH_LIMITS.vocab_size))


@asynccontextmanager
async def _listening(load):
    service = ExecutorService(LOOPBACK, load)
    port, health_port = await service.listen()
    try:
        yield service, f"127.0.0.1:{port}", f"127.0.0.1:{health_port}"
    finally:
        await service.stop()


def _placing(row, prompt):
    cells = [(row, index, row * 4 + index) for index in range(4)]
    return plan_pb2.BatchPlan(new_requests=[request(row, prompt)], grants=grants(cells))


async def _health(address, service):
    async with _stub(address, health_pb2_grpc.HealthStub) as stub:
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_info_says_who_drives(executor):
    """Term and holder, for a scheduler that wants to attach with a higher one."""
    async with _stub(executor.address) as stub:
        idle = await stub.GetInfo(executor_pb2.GetInfoRequest())
        async with attached(executor.address, hello("driver", 7, address="host:1")) as client:
            await client.run([(0, 3)], _placing(0, [1, 2, 3]))
            waiting, _ = await attach_until(executor.address, "waiting", hello("next", 8))
            driven = await stub.GetInfo(executor_pb2.GetInfoRequest())
            waiting.cancel()

    assert (idle.epoch, idle.term, idle.holder_scheduler_id, idle.last_step_id) == (0, 0, "", 0)
    assert (driven.epoch, driven.term, driven.holder_scheduler_id, driven.last_step_id) == (1, 8, "driver", 1)
    assert (idle.num_waiting_schedulers, driven.num_waiting_schedulers) == (0, 1)
    assert (idle.holder_address, driven.holder_address) == ("", "host:1")
    assert driven.tokenizer_digest == client.welcome.tokenizer_digest
    assert driven.incarnation == client.welcome.incarnation
    assert (driven.model.name, driven.device, driven.draining) == ("hash", "simulated", False)
    assert driven.uptime.ToNanoseconds() > idle.uptime.ToNanoseconds()


async def test_state_shows_rows_and_records(executor):
    """In a form that people can read; tokens and records only if asked for."""
    release = plan_pb2.Release(row=0, final=plan_pb2.FinalRelease(num_output_tokens=1, reason=1))
    async with attached(executor.address) as client, _stub(executor.address) as stub:
        await client.run([(0, 3)], _placing(0, [1, 2, 3]))
        await client.run([(1, 2)], _placing(1, [4, 5]))
        await client.run((), plan_pb2.BatchPlan(releases=[release]))
        terse = await stub.GetState(executor_pb2.GetStateRequest())
        full = await stub.GetState(executor_pb2.GetStateRequest(include_records=True, include_token_ids=True))
        cut = await stub.GetState(executor_pb2.GetStateRequest(include_records=True, max_num_rows=1))

    (row,) = terse.rows
    assert (row.row, row.num_prompt_tokens, row.num_output_tokens, list(row.block_ids)) == (1, 2, 1, [4, 5, 6, 7])
    assert not row.prompt_token_ids
    assert [list(view.prompt_token_ids) for view in full.rows] == [[4, 5], [1, 2, 3]]
    assert (full.num_rows_in_use, full.num_records, full.num_granted_blocks) == (1, 1, 4)
    assert (len(cut.rows), cut.truncated, full.truncated) == (1, True, False)


async def test_state_shows_logprobs_if_asked_for(executor, monkeypatch):
    placing = _placing(0, [1, 2, 3])
    placing.new_requests[0].num_logprobs = 2
    async with attached(executor.address) as client, _stub(executor.address) as stub:
        told = [(await client.run([(0, 3)], placing)).logprobs[0].tokens[0]]
        told += [(await client.run([(0, 1)])).logprobs[0].tokens[0] for _ in range(2)]
        terse = await stub.GetState(executor_pb2.GetStateRequest())
        full = await stub.GetState(executor_pb2.GetStateRequest(include_logprobs=True))
        monkeypatch.setattr(servicer_views, "_MAX_LOGPROBS", 2)
        cut = await stub.GetState(executor_pb2.GetStateRequest(include_logprobs=True))

    assert (list(terse.rows[0].logprobs), terse.truncated) == ([], False)
    assert (list(full.rows[0].logprobs), full.truncated) == (told, False)
    assert (list(cut.rows[0].logprobs), cut.truncated) == (told[:2], True)


@pytest.mark.parametrize("max_num_rows", [0, 1025, 2**32 - 1])
async def test_a_state_request_out_of_range_names_the_field(executor, max_num_rows):
    async with _stub(executor.address) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match="max_num_rows") as failure:
            await stub.GetState(executor_pb2.GetStateRequest(max_num_rows=max_num_rows))

    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert info_of(failure.value).reason == "INVALID_FIELD"


async def test_the_tokenizer_comes_in_parts_that_make_up_the_whole():
    """None larger than 1 MiB; the first carries the rest."""
    json = bytes(range(256)) * 10_000
    async with hash_executor(tokenizer_json=json) as executor, _stub(executor.address) as stub:
        parts = [part async for part in stub.GetTokenizer(executor_pb2.GetTokenizerRequest())]

    assert b"".join(part.tokenizer_json for part in parts) == json
    assert all(part.ByteSize() <= 2**20 for part in parts)
    assert [part.last for part in parts] == [False, False, True]
    assert (list(parts[0].end_token_ids), parts[0].eos_token_id) == ([0], 0)
    assert not parts[0].HasField("chat_template")
    whole = TokenizerParts()
    assert [whole.add(part.SerializeToString()) for part in parts] == [False, False, True]
    assert tokenizer_digest(whole.content()) == parts[0].digest


async def test_an_unexpected_failure_leaks_no_text(executor, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("secret")

    monkeypatch.setattr("paceline_executor.link.servicer.info_of", fail)
    async with _stub(executor.address) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.GetInfo(executor_pb2.GetInfoRequest())

    assert failure.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in failure.value.details()
    assert info_of(failure.value).reason == "INTERNAL"
    assert "secret" in capsys.readouterr().out


async def test_the_ports_answer_while_the_model_loads():
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()

    def load():
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
        return _load()

    async with _listening(load) as (service, address, health_address), _stub(address) as stub:
        loading = asyncio.create_task(service.load())
        live, ready = await _health(address, ""), await _health(health_address, SERVICE)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetInfo(executor_pb2.GetInfoRequest())
        with pytest.raises(grpc.aio.AioRpcError) as not_attached:
            async with attached(address):
                pass
        gate.set()
        await loading
        ready_later = await _health(health_address, SERVICE)

    assert (live, ready, ready_later) == (READY, NOT_READY, READY)
    for failure in (refused, not_attached):
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
        assert info_of(failure.value).reason == "LOADING"


async def test_what_loading_raises_reaches_the_process():
    def load():
        raise ModelCorruptError("the file is cut short")

    async with _listening(load) as (service, _, _):
        with pytest.raises(ModelCorruptError, match="cut short"):
            await service.load()


async def test_a_port_in_use_is_an_error_with_the_address():
    """Two executors never share a port."""
    async with _listening(_load) as (_, address, _):
        port = int(address.rpartition(":")[2])
        second = ExecutorService(ServiceConfig("127.0.0.1", port, None), _load)
        with pytest.raises(PortError, match=address):
            await second.listen()


async def test_an_executor_stuck_in_a_step_is_not_ready(executor):
    executor.runner.gate.clear()
    async with attached(executor.address) as client, _stub(executor.address, health_pb2_grpc.HealthStub) as stub:
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        seen = [(await watch.read()).status]
        await client.step([(0, 3)], _placing(0, [1, 2, 3]))
        seen.append((await watch.read()).status)
        executor.runner.gate.set()
        seen.append((await watch.read()).status)
        watch.cancel()

    assert seen == [READY, NOT_READY, READY]


async def test_reflection_lists_the_services(executor):
    """So that grpcurl needs no protos."""
    async with _stub(executor.address, reflection_pb2_grpc.ServerReflectionStub) as stub:
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer = await call.read()

    names = {service.name for service in answer.list_services_response.service}
    assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def test_a_drain_tells_the_scheduler_and_waits_for_its_rows(executor):
    async with attached(executor.address) as client, _stub(executor.address) as stub:
        await client.run([(0, 3)], _placing(0, [1, 2, 3]))
        draining = asyncio.create_task(executor.service.drain(30))
        result = await client.run([(0, 1)])
        not_ready = await _health(executor.address, SERVICE)
        still_draining = not draining.done()
        await client.run((), plan_pb2.BatchPlan(releases=[plan_pb2.Release(row=0)]))
        has_drained = await draining
        info = await stub.GetInfo(executor_pb2.GetInfoRequest())

    assert (not_ready, still_draining, has_drained) == (NOT_READY, True, True)
    assert (client.drains, info.draining) == (1, True)
    assert column([1]) == result.num_accepted


async def test_a_drain_ends_with_its_grace(executor):
    async with attached(executor.address) as client:
        await client.run([(0, 3)], _placing(0, [1, 2, 3]))

        assert not await executor.service.drain(0.3)


async def test_streams_that_are_open_when_the_executor_stops_end_with_a_reason():
    async with hash_executor() as executor, attached(executor.address) as client:
        stopping = asyncio.create_task(executor.service.stop())
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await client.result()
        await stopping

    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
    assert info_of(failure.value).reason == "DRAINING"
    assert failure.value.details() == "the executor ends; use another one"


async def test_streams_are_told_that_the_executor_has_failed():
    async with hash_executor() as executor, attached(executor.address) as client:
        executor.service._steps.ended.set_exception(DeviceError("steps fail"))
        await executor.service.stop()
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await client.result()

    assert failure.value.details() == "the executor has failed and ends: steps fail; use another one"
