"""The metrics of all processes are documented, each once, as they are."""

import re

import pytest

from paceline.process.metrics_port import PREFIX
from paceline_executor.link import metrics as executor
from paceline_executor.rows import forms
from paceline_gateway import metrics as gateway
from paceline_scheduler.config import parse_config
from paceline_scheduler.observers import definitions as scheduler
from repository_checks.sources import ROOT

pytestmark = pytest.mark.lint

OPERATING = (ROOT / "OPERATING.md").read_text(encoding="utf-8")
DEFINITIONS = (
    *(*scheduler.READ, *scheduler.COUNTED, *executor.READ, *executor.COUNTED, *forms.COUNTED),
    *(*gateway.READ, *gateway.COUNTED),
)


def documented(text):
    """The rows of the tables: name, kind and labels."""
    rows = re.findall(r"^\| `(\w+)` \| (gauge|counter|histogram) \| ((?:`\w+` ?)*)\| (\S.*) \|$", text, re.MULTILINE)
    return [(name, kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in rows]


def test_every_metric_is_documented_once_and_no_other():
    real = [(PREFIX + each.name, each.kind.value, each.labels) for each in DEFINITIONS]
    assert sorted(documented(OPERATING)) == sorted(real)


def test_a_metric_that_is_missing_in_the_table_is_noticed():
    first = OPERATING.index("| `paceline_num_requests_running`")
    spoilt = OPERATING[:first] + OPERATING[OPERATING.index("\n", first) + 1 :]
    assert len(documented(spoilt)) == len(DEFINITIONS) - 1


def test_an_endpoint_picker_is_told_of_gauges_of_the_right_meaning():
    named = dict(re.findall(r"^--([a-z-]+)-metric=paceline_(\w+)$", OPERATING, re.MULTILINE))
    assert named == {
        "total-queued-requests": scheduler.NUM_WAITING.name,
        "total-running-requests": scheduler.NUM_RUNNING.name,
        "kv-cache-usage-percentage": scheduler.KV_USAGE.name,
        "cache-info": scheduler.CACHE_INFO.name,
    }
    told = {each.name: each for each in scheduler.READ if each.name in named.values()}
    assert {each.kind.value for each in told.values()} == {"gauge"}
    assert {"block_size", "num_gpu_blocks"} <= set(told[scheduler.CACHE_INFO.name].labels)
    port = parse_config(["--executors", "localhost:1"]).metrics_port
    assert re.findall(r"^--model-server-metrics-port=(\d+)$", OPERATING, re.MULTILINE) == [str(port)]
