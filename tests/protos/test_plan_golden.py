"""The bytes of the plan stream, pinned: a peer of another language or release reads and writes the same."""

import dataclasses

import numpy as np
import pytest

from paceline.plan import sampling
from paceline.plan import values as plan
from paceline.plan.codec import decode_request, decode_response, encode_request, encode_response
from paceline.plan.codec.columns import column_bytes, read_column
from paceline.plan.versions import ProtocolRange
from paceline.v1.plan_pb2 import AttachRequest, AttachResponse
from scheduler_rig.requests import column


def logprobs(offset, drawn, top_token_ids, top_logprobs):
    """Log-probabilities with the same number of alternatives each."""
    top_logprobs = np.array(top_logprobs, dtype=np.float32)
    return plan.LogprobColumns(offset, np.array(drawn, dtype=np.float32), column(*top_token_ids), top_logprobs)


@dataclasses.dataclass(frozen=True)
class Golden:
    """One message: what it says, and its bytes in hex."""

    value: object
    hex: str

    @property
    def data(self):
        return bytes.fromhex(self.hex)


# The fields of a message stand together, as its bytes do.
# fmt: off
DECODE_ONLY = Golden(
    plan.BatchPlan(0x0102030405060708, 3, 300, column(0, 5), column(1, 0x10203), predicted_ns=5),
    "1224 090807060504030201 1003 18ac02 5208 00000000 05000000 5a08 01000000 03020100 6805",
)
PLACING = Golden(
    plan.BatchPlan(
        incarnation=1, epoch=2, step_id=1, rows=column(4),
        num_scheduled_tokens=column(3), num_draft_tokens=column(2), min_draft_chance=0.5, draft_spare_ns=300,
        tags=plan.BlockTags.of([(7, b"k" * 16)]),
        releases=(plan.Release(2, None), plan.Release(3, plan.FinalRelease(11, plan.FinishReason.STOP))),
        copies=plan.BlockCopies(column(8), column(9)),
        new_requests=(
            plan.NewRequest(
                row=4, record_id=plan.RecordId("t", "r", 2), attempt=1, prompt_token_ids=column(1, 2, 3),
                output_token_ids=column(9), num_cached_tokens=2,
                sampling=sampling.SamplingParams(0.5, 40, 0.25, 0.0, 7, -0.5, 0.5, 2.0, ((3, -2.0),), (1, 300)),
                end_token_ids=(2,), max_tokens=16, num_logprobs=0, context=b"ctx",
                min_tokens=1, num_prompt_logprobs=2, bad_word_token_ids=((5, 6),), ignored_end_token_ids=(8,),
                trace_parent="tp", structured=b"\x12\x01a",
            ),
        ),
        grants=plan.BlockGrants(column(4), column(1), column(9)),
        shared=plan.BlockGrants(column(4), column(0), column(7)),
        forget=(plan.RecordId("t", "old"),),
    ),
    """128d02 090100000000000000 1002 1801
    2218 0a0407000000 1210 6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b
    2a02 0802 2a08 0803 1204080b1001
    320c 0a0408000000 120409000000
    3a7a 0804 1208 0a0174 120172 1802 1801 220c 010000000200000003000000 2a0409000000 3002
      3a30 0d0000003f 1028 1d0000803e 2500000000 2807 35000000bf 3d0000003f 4500000040
        4a07 0803 15000000c0 520301ac02
      420102 4810 5000 5a03637478 6001 6802 7203120161 7a040a020506 82010108 9201027470
    4212 0a0404000000 120401000000 1a0409000000
    4a12 0a0404000000 120400000000 1a0407000000
    520404000000 5a0403000000 620402000000
    7208 0a0174 12036f6c64
    95010000003f 9801ac02""",
)
HELLO = Golden(
    plan.Hello(plan.Claim(7, "s", "h:1"), ProtocolRange(1, 2), takeover=True, tag_key_digest=b"dg"),
    "0a14 0a0173 1007 1801 2002 2801 32026467 3a03683a31",
)
RESULT = Golden(
    plan.StepResult(
        incarnation=1, epoch=2, step_id=3, rows=column(0, 5), num_accepted=column(2, 0), token_ids=column(42, 43),
        finishes=np.array([plan.RowFinish.END_TOKEN, plan.RowFinish.ERROR], dtype=np.uint8),
        grant_hash=0xCBF29CE484222325,
        timings=plan.StepTimings(waited_ns=1, prepare_ns=2, forward_ns=3, sample_ns=4, idle_ns=5, draft_ns=6),
        logprobs=(plan.RowLogprobs(0, column(42, 43), logprobs(0, [-0.5, -1.0], ([42], [7]), [[-0.5], [-0.25]])),),
        errors=(plan.RowError(5, 3, "R", "m", "f"),),
        prompt_logprobs=(plan.RowLogprobs(5, column(8), logprobs(3, [-0.5], ([9],), [[-1.0]])),),
        num_draft_tokens=column(1, 0),
    ),
    """228b02 090100000000000000 1002 1803
    2208 0000000005000000 2a08 0200000000000000 3208 2a0000002b000000 3a020104
    4224 1210 082a 15000000bf 1a07 082a 15000000bf 1210 082b 15000080bf 1a07 0807 15000080be
    4a7b 0805 1277 0803 12016d
      1a39 0a28 747970652e676f6f676c65617069732e636f6d2f676f6f676c652e7270632e4572726f72496e666f
        120d 0a0152 1208 706163656c696e65
      1a35 0a29 747970652e676f6f676c65617069732e636f6d2f676f6f676c652e7270632e42616452657175657374
        1208 0a06 0a0166 12016d
    51 25232284e49cf2cb
    5a0c 0801 1002 1803 2004 2805 3006
    6208 0100000000000000
    6a16 0805 1003 1a10 0808 15000000bf 1a07 0809 15000080bf""",
)
# A top_k of 0 keeps all, which is not sent.
SNAPSHOT = Golden(
    plan.SnapshotPart(
        rows=(
            plan.RowState(
                record_id=plan.RecordId("t", "r"), row=0, attempt=2, prompt_token_ids=column(1, 2),
                output_token_ids=column(3, 4), num_computed_tokens=2, block_ids=column(8), finish=plan.RowFinish.LENGTH,
                released=plan.FinalRelease(1, plan.FinishReason.LENGTH), max_tokens=4,
                sampling=sampling.SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=7),
                end_token_ids=(2,),
                context=b"ctx", logprobs=logprobs(1, [-0.5], ([3, 4],), [[-0.5, -1.0]]), continues=True,
            ),
        ),
        tags=plan.BlockTags.of([(8, b"k" * 16)]), num_parts=1,
    ),
    """1a8f01
    0a6f 0a06 0a0174 120172 1000 1802 2208 0100000002000000 2a08 0300000004000000 3002 3a0408000000 4002
      4a04 0801 1002 5004 5a11 0d00000000 1d0000803f 2500000000 2807 620102 6a03637478 7001
      7a1e 0801 1204000000bf 1802 2208 0300000004000000 2a08 000000bf000080bf
    1218 0a0408000000 1210 6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b
    1801 3801""",
)
WELCOME = Golden(
    plan.Welcome(
        incarnation=1, epoch=2, protocol=2,
        model=plan.Model("m", "llama", 2048, 256, 1000, "Q4_1", (2,), True, sampling.GenerationDefaults(0.5)),
        geometry=plan.KvGeometry(64, 16, 4096, "int8"), limits=plan.ExecutorLimits(4, 128, 2048, 3, 5),
        tag_key=b"kk", tokenizer_digest="d", step_points=(plan.StepPoint(16, 1000),),
        failed_step=plan.FailedStep(1, 9, "s"),
        graphs=plan.GraphSizes((1, 8), (64, 576)),
    ),
    """1275 090100000000000000 1002 1802
    2227 0a016d 12056c6c616d61 188010 208002 2a0102 3001 3801 40e807 4a0451345f31 5205 0d0000003f
    2a0d 0840 1010 188020 2204696e7438
    320c 0804 108001 188010 2003 2805
    3a026b6b 4205 0810 10e807 4a0164 5207 0801 1009 1a0173
    5a09 0a02 0108 1203 40c004""",
)
IN_LINE = Golden(plan.WaitingInLine(plan.Claim(7, "s", "h:1")), "0a0a 0a0173 1007 1a03683a31")
BEAT = Golden(plan.Heartbeat(3, 9), "2a04 0803 1009")
DRAIN = Golden(plan.Drain("bye", 2.5), "320f 0a03627965 1208 0802 1080cab5ee01")
# fmt: on
TO_EXECUTOR = {
    "a plan that only decodes": DECODE_ONLY,
    "a plan with everything": PLACING,
    "hello": HELLO,
    "a scheduler's heartbeat": Golden(plan.Heartbeat(), "1a00"),
}
FROM_EXECUTOR = {
    "a result": RESULT,
    "a part of a snapshot": SNAPSHOT,
    "a welcome": WELCOME,
    "queued": IN_LINE,
    "a heartbeat": BEAT,
    "a drain": DRAIN,
}
SAID = [
    *(
        pytest.param(encode_request, decode_request, AttachRequest, golden, id=name)
        for name, golden in TO_EXECUTOR.items()
    ),
    *(
        pytest.param(encode_response, decode_response, AttachResponse, golden, id=name)
        for name, golden in FROM_EXECUTOR.items()
    ),
]


@pytest.mark.parametrize(("encode", "decode", "kind", "golden"), SAID)
def test_these_bytes_are_written_and_read(encode, decode, kind, golden):
    """Compared field by field, as protobuf leaves their order open; those that the protos do not know count too."""
    assert kind.FromString(encode(golden.value)) == kind.FromString(golden.data)
    (read,) = decode(golden.data)
    assert type(read) is type(golden.value)
    np.testing.assert_equal(dataclasses.asdict(read), dataclasses.asdict(golden.value))


def test_plans_and_results_that_travel_together_have_a_field_of_their_own():
    one, result = AttachRequest.FromString(DECODE_ONLY.data).plan, AttachResponse.FromString(RESULT.data).result
    plans, results = encode_request(DECODE_ONLY.value, DECODE_ONLY.value), encode_response(RESULT.value, RESULT.value)
    assert (plans[0] >> 3, results[0] >> 3) == (4, 7)
    assert AttachRequest.FromString(plans) == AttachRequest(plans={"plans": [one, one]})
    assert AttachResponse.FromString(results) == AttachResponse(results={"results": [result, result]})


def test_a_column_is_little_endian_on_every_machine():
    big = np.array([1, -2, 0x01020304], dtype=">i4")
    assert column_bytes(big) == b"\x01\x00\x00\x00\xfe\xff\xff\xff\x04\x03\x02\x01"
    read = read_column("rows", b"\x04\x03\x02\x01")
    assert (read.dtype, read.tolist()) == (np.int32, [0x01020304])
