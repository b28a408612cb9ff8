"""The runner without a model: its tokens prove what was read, and its steps take the time that a table says."""

import json

import numpy as np
import pytest

from executor_rig.driving import Draw, DrivenRow, Driver, step_batch
from executor_rig.hash_runner import HashRule, HashRunner, continuation, next_token
from paceline_executor.errors import StepTimesError
from paceline_executor.runner.interface import CacheGeometry
from paceline_executor.runner.simulated import SimulatedRunner
from paceline_executor.runner.step_times import StepTimeCurve, read_step_times

VOCAB_SIZE = 1000
LINE = StepTimeCurve(((1, 2000.0), (11, 12000.0)))  # 1 us, and 1 us per token


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self):
        self.now_ns = 0
        self.slept_s = []

    def sleep(self, seconds):
        """Let time pass."""
        self.slept_s.append(seconds)
        self.now_ns += round(seconds * 1e9)


@pytest.fixture
def clock():
    """It begins at 0."""
    return Clock()


def runner(num_blocks=64, block_size=4, step_times=LINE, clock=None, **options):
    """A runner whose time is the clock's."""
    clock = clock or Clock()
    return SimulatedRunner(
        num_blocks,
        block_size,
        VOCAB_SIZE,
        step_times=step_times,
        clock_ns=lambda: clock.now_ns,
        sleep=clock.sleep,
        **options,
    )


def prompts(number):
    """Prompts of different lengths."""
    return [[(31 * i + 7 * position) % VOCAB_SIZE for position in range(1 + 5 * i)] for i in range(number)]


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("max_chunk", [1, 5, 100])
def test_tokens_follow_from_all_before_them_whatever_blocks_and_chunks_they_are_in(block_size, max_chunk):
    driver = Driver(runner(512 // block_size, block_size), seed=3)
    rows = [driver.add(prompt, Draw(seed=i), max_chunk=max_chunk) for i, prompt in enumerate(prompts(8))]

    outputs = driver.run(rows, 20)

    assert outputs == [continuation(prompt, 20, VOCAB_SIZE, seed=i) for i, prompt in enumerate(prompts(8))]


def test_tokens_are_drawn_from_those_that_it_is_given():
    """So that text made of them can be shown."""
    driver = Driver(runner(drawn=range(32, 127)))
    (output,) = driver.run([driver.add([1, 2, 3])], 40)

    assert output == continuation([1, 2, 3], 40, range(32, 127))
    assert set(output) <= set(range(32, 127))


@pytest.mark.parametrize("change", ["lost", "doubled", "swapped", "other"])
def test_a_token_that_is_wrong_anywhere_changes_what_follows(change):
    wrong = {"lost": [5, 6, 8], "doubled": [5, 6, 6, 7, 8], "swapped": [6, 5, 7, 8], "other": [5, 6, 9, 8]}[change]
    assert continuation([5, 6, 7, 8], 3, VOCAB_SIZE, seed=1) != continuation(wrong, 3, VOCAB_SIZE, seed=1)


def test_end_tokens_come_about_as_often_as_asked():
    """With the given probability, and never otherwise; none before the minimum."""
    rule = HashRule(50, (7,), 0.1)
    lengths = [len(rule.output([1, 2], 40, seed, (7,))) for seed in range(200)]
    assert 7 < sum(lengths) / 200 < 12.5
    assert len(HashRule(50, (7,)).output([1, 2], 40, 3, (7,))) == 40
    assert min(len(rule.output([1, 2], 40, seed, (7,), min_tokens=5)) for seed in range(200)) == 6


def test_rules_of_another_salt_draw_otherwise():
    assert HashRule(1000).output([1], 5, 0) != HashRule(1000, salt=1).output([1], 5, 0)


@pytest.mark.parametrize("rule", [HashRule(50, (7,), 0.2), HashRule(50, salt=3), HashRule(50, drawn=range(9, 30))])
def test_a_runner_draws_by_the_rule_that_it_is_given(rule):
    driver = Driver(HashRunner(64, 4, 50, rule))
    assert driver.run([driver.add([1, 2, 3])], 30) == [rule.output([1, 2, 3], 30, 0)]


def batch_of(row, num_tokens):
    """The batch that computes so many more tokens of a row, its last ones."""
    return step_batch([row], [num_tokens], [0])


def chunk(token_ids):
    """A batch of one row that computes these tokens, in the first blocks."""
    return batch_of(DrivenRow(token_ids, len(token_ids), Draw(), [0, 1, 2], 100), len(token_ids))


@pytest.mark.parametrize("position", [0, 3, 4, 9])
def test_a_slot_that_is_not_as_its_row_wrote_it_changes_what_follows(position):
    """In the first block, in the middle, in the last one: the next token is that of what is read there."""
    simulated = runner()
    driver = Driver(simulated)
    row = driver.add(range(10))
    driver.step([row])
    seen = [*row.token_ids]
    seen[position] = 99
    other = DrivenRow(seen[: position + 1], 1, Draw(), row.blocks, 1, num_computed=position)
    simulated.launch(batch_of(other, 1))

    driver.step([row])

    assert row.output[1] == next_token(seen, 0, 1, VOCAB_SIZE) != continuation(range(10), 2, VOCAB_SIZE)[1]


def test_what_lies_behind_a_row_in_its_last_block_does_not_count():
    driver = Driver(runner(num_blocks=4))
    before = driver.add(list(range(16)))
    driver.step([before])
    driver.drop(before)
    row = driver.add([5, 6])

    assert driver.run([row], 2) == [continuation([5, 6], 2, VOCAB_SIZE)]


def test_a_copied_block_is_read_like_its_source():
    simulated = runner(num_blocks=8)
    driver = Driver(simulated)
    row = driver.add(list(range(7)))
    driver.step([row])
    free = driver._free.pop()
    simulated.copy_blocks(np.array([row.blocks[0]]), np.array([free]))
    row.blocks[0] = free

    assert driver.run([row], 3) == [continuation(range(7), 3, VOCAB_SIZE)]


def test_a_slot_holds_a_token_id():
    """Four bytes, as --kv-cache-memory counts them."""
    assert runner(64, 16).kv_geometry == CacheGeometry(64, 16, 1, 1, 1, 64)


def test_a_step_is_done_when_its_time_is_over_and_sleeps_until_then(clock):
    simulated = runner(clock=clock)
    handle = simulated.launch(chunk([1, 2, 3]))
    assert not simulated.is_done(handle)

    output = simulated.wait(handle)

    assert simulated.is_done(handle)
    assert clock.slept_s == [pytest.approx(4e-6)]
    assert (output.forward_ns, output.sample_ns) == (4000, 0)


def test_what_computing_took_is_part_of_the_time(clock):
    simulated = runner(clock=clock)
    handle = simulated.launch(chunk([1, 2, 3]))
    clock.now_ns += 3000
    simulated.wait(handle)
    late = simulated.launch(chunk([1, 2, 3]))
    clock.now_ns += 9000
    simulated.wait(late)

    assert clock.slept_s == [pytest.approx(1e-6)]


def test_without_a_table_steps_take_no_time(clock):
    simulated = runner(step_times=StepTimeCurve(), clock=clock)

    output = simulated.launch(chunk([1, 2, 3]))

    assert (output.forward_ns, clock.slept_s) == (0, [])
    assert max(duration_ns for _, duration_ns in simulated.warm_up()) <= 2000


@pytest.mark.parametrize(
    ("times", "told"),
    [(LINE, ((1, 2000), (11, 12000))), (StepTimeCurve(((1, 5000.0),)), ((1, 5000), (513, 5000)))],
    ids=["as in the table", "of a single time"],
)
def test_schedulers_are_told_at_least_two_points_of_a_table(times, told):
    """By one of them nobody knows what a token costs."""
    assert runner(step_times=times).warm_up() == told


# The table


@pytest.mark.parametrize(("num_tokens", "duration_us"), [(1, 10), (4, 25), (7, 40), (12, 50), (17, 60), (22, 70)])
def test_times_lie_on_lines_between_points_and_go_on_beyond_them(num_tokens, duration_us):
    times = StepTimeCurve(((2, 15_000.0), (7, 40_000.0), (17, 60_000.0)))

    assert times.step_ns(num_tokens, 0) == duration_us * 1000


def test_pairs_are_paid_for_each(clock):
    """A chunk of three tokens behind two: each attends to those two and to what is before it, and itself."""
    simulated = runner(step_times=StepTimeCurve(((1, 0.0),), ns_per_pair=10.0), clock=clock)
    row = DrivenRow([1, 2, 3, 4, 5], 5, Draw(), [0, 1], 100, num_computed=2)

    output = simulated.launch(batch_of(row, 3))

    assert output.forward_ns == 10 * (3 * 2 + 1 + 2 + 3)


def test_a_file_says_points_pairs_and_what_pairs_its_points_include(tmp_path):
    file = tmp_path / "steps.json"
    points = [
        {"num_tokens": 1, "duration_us": 5.5},
        {"num_tokens": 100, "num_pairs": 5050, "duration_us": 1000},
    ]
    file.write_text(json.dumps({"points": points, "us_per_million_pairs": 40_000}))

    times = read_step_times(file)

    assert times.step_ns(1, 0) == 5500
    assert times.step_ns(100, 5050) == 1_000_000
    assert times.step_ns(100, 0) == 1_000_000 - 40 * 5050


ONE = {"num_tokens": 1, "duration_us": 1}
BAD = {
    "no object": ("[]", "the file is not a JSON object"),
    "nothing": ("{}", "points is not a list of at least one"),
    "no point": ('{"points": []}', "points is not a list"),
    "another field": (json.dumps({"points": [ONE], "point": 1}), "the file has a field 'point'; known are points"),
    "no duration": ('{"points": [{"num_tokens": 1}]}', r"points\[0\].duration_us is not a number from 0"),
    "negative": ('{"points": [{"num_tokens": 1, "duration_us": -1}]}', r"points\[0\].duration_us"),
    "not finite": ('{"points": [{"num_tokens": 1, "duration_us": NaN}]}', r"points\[0\].duration_us"),
    "too long": ('{"points": [{"num_tokens": 1, "duration_us": 1e18}]}', r"points\[0\].duration_us"),
    "half a token": ('{"points": [{"num_tokens": 0.5, "duration_us": 1}]}', r"points\[0\].num_tokens is not a whole"),
    "true": ('{"points": [{"num_tokens": true, "duration_us": 1}]}', r"points\[0\].num_tokens"),
    "not ascending": (json.dumps({"points": [ONE, ONE]}), r"points\[1\].num_tokens is 1, which does not come after 1"),
    "a point that is none": ('{"points": [5]}', r"points\[0\] is not a JSON object"),
    "no JSON": ('{"points": [\n{]}', "line 2 column 2"),
    "deep": ("[" * 100_000, "recursion"),
    "no text": ("\udcff", "decode byte"),
}


@pytest.mark.parametrize(("text", "fault"), BAD.values(), ids=BAD)
def test_a_file_that_is_no_table_is_refused_by_line_or_field(tmp_path, text, fault):
    file = tmp_path / "steps.json"
    file.write_bytes(text.encode(errors="surrogateescape"))

    with pytest.raises(StepTimesError, match=fault) as error:
        read_step_times(file)

    assert str(file) in str(error.value)
    assert "--runner" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(StepTimesError, match=r"cannot read .*nowhere.json: No such file"):
        read_step_times(tmp_path / "nowhere.json")
