"""One step in the order in which it happens: client, scheduler, wire, executor, and back. Start reading here."""

from dataclasses import replace

import numpy as np

from edge_rig.tokenizers import served_model
from paceline.plan.codec import decode_request, decode_response, encode_request, encode_response
from paceline.plan.hashes import HASH_START, rolling_hash
from paceline_client import Output, Sampling, Scheduling, Stopping, Timeout
from paceline_client.requests import GenerationRequest, TokenIds
from paceline_client.wire import generate_message, read_deltas
from paceline_executor.limits import RowLimits
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.simulated import SimulatedRunner
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.api.outbox import MessageContent, PendingDelta
from paceline_scheduler.api.validation import validate
from paceline_scheduler.api.wire import session_response
from paceline_scheduler.core.core import Core
from paceline_scheduler.core.events import ExecutorAttached, StepFinished, Submit
from paceline_scheduler.core.executors import ExecutorDescription, Snapshot
from paceline_scheduler.core.limits import CoreLimits

PROMPT = np.array([72, 105], dtype=np.int32)
SETTINGS = {"sampling": Sampling(), "stopping": Stopping(), "output": Output(), "scheduling": Scheduling()}
EXECUTOR = ExecutorDescription("here", 1, 1, "tiny", 8, 16, 2, 32, 64, 2, bytes(32), 256)


def test_a_request_gets_its_first_token():
    # The client says what it wants, and may say it again where a connection was lost.
    request = GenerationRequest(
        prompt=TokenIds((72, 105)), request_id="r", tenant="t", model="tiny", timeout=Timeout(), **SETTINGS
    )
    asked = generate_message(request, max_bytes=4096).generate

    # The scheduler's edge checks it. Its core keeps it, and decides which rows move in the next step, and how far.
    core = Core(CoreLimits())
    core.apply(ExecutorAttached(EXECUTOR, Snapshot()), now=0.0)
    valid, _ = validate(asked, (served_model(name="tiny"),), 0.0, None, EdgeLimits())
    core.apply(Submit((replace(valid, handle=1, prompt_token_ids=PROMPT),)), now=0.0)
    plan = core.plan("here", now=0.0)

    # The plan crosses the wire. The executor changes its rows, computes, and lands what the device has drawn.
    (received,) = decode_request(encode_request(plan))
    table, device = RowTable(RowLimits(2, 64, 32, 8, 16, 256)), SimulatedRunner(8, 16, 256, drawn=range(65, 91))
    launched = table.launch(received, now_ns=0)
    output = device.wait(device.launch(launched.prepared.batch))
    result = table.land(launched, output)

    # The result crosses the wire. The core advances the same rows, and hands on what they drew.
    (returned,) = decode_response(encode_response(result))
    (tokens,) = core.apply(StepFinished("here", returned), now=0.1).tokens
    (drawn,) = tokens.token_ids.tolist()
    delta = PendingDelta("r", int(tokens.offsets[0]), 1, int(tokens.rolling_hashes[0]), [drawn], chr(drawn))

    # The client has its first token, and the hash by which it may go on, wherever that is.
    (read,) = read_deltas(session_response(MessageContent((delta,), (), heartbeat=False, drain=None)))
    assert (read.delta.offset, read.delta.token_ids, read.delta.text) == (0, (drawn,), chr(drawn))
    assert read.rolling_hash == rolling_hash(HASH_START, output.token_ids)
