"""All fuzz targets, by name. Apart, so that none of their modules knows another."""

from collections.abc import Mapping

from fuzzing import call_targets, model_targets, plan_targets, recording_targets, text_targets
from fuzzing.target import Target

TARGETS: Mapping[str, Target] = {
    target.name: target
    for module in (plan_targets, call_targets, model_targets, text_targets, recording_targets)
    for target in module.TARGETS
}
