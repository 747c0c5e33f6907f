"""Limits, spikes and edges as pure functions: which numbers raise what, and which do not."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest

from framework.config.compose import compose
from framework.config.schema import Alerts, Config, Recompute
from framework.monitor.alerts import Alert, Course, Edges, Load, Spikes, Told, actions, drift, look, median_load, summary

FINE = Load(step_s=1.0, data_s=0.02, communication_s=0.05, recompute_s=0.0, checkpoint_s=0.01, memory=0.3)


def kinds(*loads: Load, config: Config | None = None) -> list[str]:
    return [alert.kind for alert in look(loads, config or Config())]


def test_nothing_is_said_of_ranks_that_are_fine() -> None:
    assert kinds(FINE, FINE) == []
    assert kinds(FINE) == []


@pytest.mark.parametrize(
    ("load", "kind"),
    [
        (replace(FINE, memory=0.81), "memory"),
        (replace(FINE, data_s=0.11), "data_wait"),
        (replace(FINE, recompute_s=0.2), "recompute"),
        (replace(FINE, step_s=1.5), "straggler"),
        (replace(FINE, utilisation=0.69), "utilisation"),
        (replace(FINE, utilisation=0.96), "utilisation"),
    ],
)
def test_one_rank_beyond_a_limit_is_enough(load: Load, kind: str) -> None:
    assert kinds(load, FINE, FINE, config=replace(Config(), alerts=Alerts())) == [kind]
    [alert] = look([FINE, FINE, load], Config())
    assert alert.change
    assert alert.rank == (None if kind == "utilisation" else 2)


def test_a_limit_is_not_passed_by_what_equals_it() -> None:
    assert kinds(replace(FINE, memory=0.8), replace(FINE, data_s=0.1)) == []


def test_communication_is_what_even_the_slowest_rank_waits_for() -> None:
    waits = replace(FINE, communication_s=0.4)
    assert kinds(waits, waits) == ["communication"]
    assert kinds(waits, FINE) == ["straggler"]  # it waits for the other one, whose work is longer
    assert kinds(waits) == []


def test_computing_again_is_right_where_memory_is_short() -> None:
    assert kinds(replace(FINE, recompute_s=0.3, memory=0.5)) == []
    assert kinds(replace(FINE, recompute_s=0.3, memory=0.3)) == ["recompute"]


def test_null_switches_a_limit_off() -> None:
    shares = ("memory", "communication", "data_wait", "recompute", "straggler", "utilisation_low", "utilisation_high")
    off = replace(Alerts(), **dict.fromkeys(shares))
    bad = Load(1.0, 0.5, 0.45, 0.4, 0.0, 0.99, 0.1)
    assert kinds(bad, replace(bad, step_s=9.0), config=replace(Config(), alerts=off)) == []


def test_what_to_change_depends_on_what_is_set() -> None:
    full = replace(FINE, memory=0.9)

    def change(config: Config) -> str:
        return look([full, full], config)[0].change

    assert "recompute=full" in change(Config())
    assert "recompute=full" not in change(replace(Config(), recompute=Recompute("full")))
    assert "zero=stage3" in change(compose(["zero=stage2"]))
    assert "zero=stage" not in change(compose(["zero=stage3"]))


def test_a_pipeline_is_told_to_have_more_micro_batches() -> None:
    waits = replace(FINE, communication_s=0.4)
    [plain], [piped] = look([waits, waits], Config()), look([waits, waits], compose(["parallel=pipeline2"]))
    assert "batch.micro_size or batch.global_size higher" in plain.change
    assert "batch.micro_size lower" in piped.change


def test_a_window_is_its_medians() -> None:
    steps = [(1.0, {"data": 0.1, "communication": 0.2}), (9.0, {"data": 8.0, "communication": 0.2}), (1.2, {"data": 0.3})]
    assert median_load(steps, 0.5, None) == Load(1.2, 0.3, 0.2, 0.0, 0.0, 0.5, None)


def test_the_summary_names_the_rank_that_works_longest() -> None:
    said = summary([FINE, replace(FINE, step_s=2.0), FINE])
    assert (said["ranks"], said["slowest"], said["step_s"]) == (3, 1, [1.0, 1.0, 2.0])
    assert "utilisation" not in said


def test_the_height_of_a_spike_is_in_standard_deviations() -> None:
    draw, spikes = random.Random(3), Spikes()
    values = [2.0 + 0.1 * draw.gauss(0, 1) for _ in range(50)]
    for value in values:
        spikes.add(value)
    reference = (2.6 - statistics.median(values)) / 0.1  # the spread that they were drawn with
    assert spikes.height(2.6) == pytest.approx(reference, rel=0.35)
    assert spikes.height(2.05) < 1.5
    assert (spikes.height(math.nan), spikes.height(math.inf)) == (0.0, 0.0)


def test_no_spike_before_there_is_a_history() -> None:
    spikes = Spikes()
    for _ in range(7):
        spikes.add(1.0)
    assert spikes.height(100.0) == 0.0
    spikes.add(1.0)
    assert spikes.height(100.0) > 1000


def told(step: int, loss: float, norm: float = 1.0, scale: float = 1.0, skipped: bool = False, refused: bool = False) -> Told:
    return Told(step, loss, norm, scale, skipped, refused)


def course(words: str = "precision=fp32") -> Course:
    config = compose([words, "zero=stage1"])
    made = Course(config.alerts, config)
    for step in range(1, 21):
        assert made.step(told(step, 2.0 + 0.01 * (step % 5), 1.0 + 0.05 * (step % 3))) == []
    return made


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (told(21, math.nan, math.nan), "nan"),
        (told(21, 2.0, math.nan, skipped=True), "nan"),
        (told(21, math.inf), "nan"),
        (told(21, 4.0), "loss_spike"),
        (told(21, 4.0, 90.0), "loss_spike"),  # its gradient's is the same thing
        (told(21, 2.0, 90.0), "grad_spike"),
        (told(21, 4.0, math.nan, skipped=True, refused=True), "loss_spike"),
    ],
)
def test_a_bad_step_is_one_thing(step: Told, kind: str) -> None:
    assert [alert.kind for alert in course().step(step)] == [kind]


def test_a_bad_step_does_not_become_usual() -> None:
    walked = course()
    for step in range(21, 40):
        assert [alert.kind for alert in walked.step(told(step, 4.0))] == ["loss_spike"]


def test_fp16_skips_are_no_nan_until_there_are_too_many() -> None:
    walked = course("precision=fp16")
    found = [walked.step(told(step, 2.0, math.inf, 1024.0, skipped=True)) for step in range(21, 26)]
    assert [[alert.kind for alert in alerts] for alerts in found] == [[], [], [], ["skipped"], ["skipped"]]
    assert [alert.kind for alert in course("precision=fp16").step(told(21, 2.0, math.inf, 1.0, skipped=True))] == ["skipped"]


def test_a_course_goes_on_from_its_state() -> None:
    old, new = course(), Course(Alerts(), Config())
    new.restore(old.state())
    assert [alert.kind for alert in new.step(told(21, 4.0))] == ["loss_spike"]
    assert new.state() == old.state()


def test_an_alert_is_given_when_it_begins() -> None:
    edges, bad = Edges(), Alert("memory", 0.9, 0.8, "", "")
    assert edges.rising([bad], ["memory"]) == [bad]
    assert edges.rising([bad], ["memory"]) == []
    assert edges.rising([], ["data_wait"]) == []
    assert edges.rising([bad], ["memory"]) == []
    assert edges.rising([], ["memory"]) == []
    assert edges.rising([bad], ["memory"]) == [bad]


def test_the_odd_replica_is_named_where_there_is_one() -> None:
    assert drift([["a", "a"], ["b", "b"]], 8) is None
    two = drift([["a", "c"]], 8)
    three = drift([["a", "a"], ["b", "b", "c"]], 8)
    assert two is not None
    assert two.rank is None
    assert three is not None
    assert three.rank == 2


def test_actions_of_all_and_of_one() -> None:
    settings = Alerts(actions=("all:webhook", "nan:rollback", "drift:stop"))
    assert actions("nan", settings) == ["webhook", "rollback"]
    assert actions("memory", settings) == ["webhook"]
