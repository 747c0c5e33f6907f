"""framework.report: what is read of a run folder, two runs against each other, the page, the command."""

from __future__ import annotations

import json
import math
import random
import re
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from framework.base.errors import ConfigError
from framework.config.compose import compose, to_dict
from framework.report import report
from framework.studies import sheet
from framework.studies.contrast import ABSENT, environment_differences, parting, setting_differences
from framework.studies.figures import hover
from framework.studies.report import headline, page, shares
from framework.studies.story import Columns, Event, curve, edges, event, read_columns, read_settings, read_story, split
from tests import runs
from tests.ranks import ROOT
from tests.starts import assert_one_letter, start
from tests.studies.planted import EVENTS, PARTS, full, plant, train_line, write

# ---------------------------------------------------------------- what is read


def test_the_last_line_of_a_step_holds_and_missing_numbers_are_nan(tmp_path: Path) -> None:
    lines = [train_line(1, 5.0), train_line(2, 9.0), train_line(3, 8.0, mfu=0.5)]
    lines += [train_line(2, 4.0, parts={"data": 0.25}), train_line(4, "inf")]
    write(tmp_path / "metrics.jsonl", lines, torn='{"kind": "train", "step": 5, "lo')
    found = read_columns(tmp_path / "metrics.jsonl")
    assert found["train"].steps.tolist() == [1, 2, 3, 4]
    assert found["train"]["loss"].tolist() == [5.0, 4.0, 8.0, math.inf]
    assert found["train"]["mfu"].tolist() == pytest.approx([math.nan, math.nan, 0.5, math.nan], nan_ok=True)
    assert found["train"]["part data"].tolist() == pytest.approx([math.nan, 0.25, math.nan, math.nan], nan_ok=True)
    assert not found["train"].has("hidden_s")
    assert found["eval"].steps.tolist() == []


@pytest.mark.parametrize("count", [0, 1, 7, 10, 11, 25, 1003])
def test_a_curve_has_the_median_and_the_ends_of_every_bucket(count: int) -> None:
    values = [random.Random(count).gauss(0, 1) for _ in range(count)]
    values = [math.inf if at % 13 == 5 else math.nan if at % 13 == 6 else value for at, value in enumerate(values)]
    steps = np.arange(count) * 2 + 1
    cuts = edges(count, 10).tolist()
    found = curve(steps, np.array(values), 10)
    assert cuts[0] == 0
    assert cuts[-1] == count
    assert len(found.steps) == min(count, 10)
    assert found.whole == (count <= 10)
    lengths = [high - low for low, high in pairwise(cuts)]
    assert not lengths or (min(lengths) >= 1 and max(lengths) - min(lengths) <= 1)
    for at, (low, high) in enumerate(pairwise(cuts)):
        there = [value for value in values[low:high] if math.isfinite(value)]
        assert 2 * low + 1 <= found.steps[at] <= 2 * high - 1
        expected = (statistics.median(there), min(there), max(there)) if there else (math.nan,) * 3
        assert (found.middle[at], found.least[at], found.most[at]) == pytest.approx(expected, nan_ok=True)


def test_the_split_keeps_medians_of_parts_and_all_seconds_aside(tmp_path: Path) -> None:
    lines = [train_line(step, 1.0, parts={**PARTS, "forward": step * 1.0}) for step in range(1, 10)]
    lines[3]["aside_s"] = {"evaluation": 3.0}
    write(tmp_path / "metrics.jsonl", lines)
    train = read_columns(tmp_path / "metrics.jsonl")["train"]
    steps, stacks = split(train, 3)
    assert steps.tolist() == [2, 5, 8]
    assert list(stacks)[:2] == ["forward", "backward"]
    assert stacks["forward"].tolist() == [2.0, 5.0, 8.0]
    assert stacks["evaluation, between steps"].tolist() == [0.0, 1.0, 0.0]
    total, each, share = shares(train)["forward"]
    assert (total, each) == (45.0, 5.0)
    assert share == pytest.approx(45 / (45 + 3 + 9 * (sum(PARTS.values()) - PARTS["forward"])))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (EVENTS[0], Event(10, "checkpoint", "async disk, 1.00 MiB, waited 0.01 s, written in 0.5 s")),
        (EVENTS[2], Event(12, "alert", "loss_spike, rank 1: A loss <script>alert(1)</script>.", "optimizer.lr=1e-3")),
        (EVENTS[3], Event(12, "rollback", "back to the state of step 10; because loss_spike")),
        (EVENTS[4], Event(30, "signal", "rank 0: SIGTERM; rank 1: a peer")),
        (EVENTS[5], Event(30, "restart", "start 2, because rank 1 was killed")),
        (EVENTS[6], Event(30, "resume", "from checkpoints/step_00000030; zero.stage [layout]: 1 -> 2")),
        ({"event": "of tomorrow", "step": 4, "what": "x" * 999}, Event(4, "of tomorrow", "what " + "x" * 232 + "...")),
        ({"event": "pipeline", "stages": 2}, Event(0, "pipeline", "stages 2")),
    ],
)
def test_events_in_words(line: dict[str, Any], expected: Event) -> None:
    assert event(line) == expected


def test_losses_that_are_no_numbers_are_an_event(tmp_path: Path) -> None:
    [found] = [each for each in read_story(full(tmp_path / "run"), "run").events if each.kind == "not finite"]
    assert found == Event(300, "not finite", "the loss of 2 steps was not finite, of step 301 last")


def test_settings_of_another_version_are_put_aside() -> None:
    values = {**to_dict(compose(["recipe=tiny"])), "name": "mine", "lora": {"rank": 4}}
    values["zero"] = {**values["zero"], "stage": "seven", "sharding": True}
    found = read_settings(yaml.safe_dump(values), "run", Path("x"))
    assert found.unknown == {"lora": {"rank": 4}, "zero.stage": "seven", "zero.sharding": True}
    assert (found.config.name, found.config.model) == ("mine", compose(["recipe=tiny"]).model)


# ---------------------------------------------------------------- two runs


def losses(*values: float, first: int = 1) -> Columns:
    return Columns(np.arange(first, first + len(values)), {"loss": np.array(values, dtype=np.float64)})


@pytest.mark.parametrize(
    ("ours", "theirs", "last", "bits", "far"),
    [
        (losses(3.0, 2.0, 1.0), losses(3.0, 2.0), 2, None, None),
        (losses(3.0, 2.0, 1.0), losses(3.0, math.nextafter(2.0, 3), 1.0), 3, 2, None),
        (losses(3.0, 2.0, 1.0), losses(math.nextafter(3.0, 0), 2.001, 1.002), 3, 1, 3),
        (losses(3.0, 2.0), losses(3.0, 2.0021), 2, 2, 2),
        (losses(math.nan, math.inf, 1.0), losses(math.nan, math.inf, 1.0), 3, None, None),
        (losses(3.0, math.nan), losses(3.0, 2.0), 2, 2, 2),
        (losses(3.0, math.inf), losses(3.0, -math.inf), 2, 2, 2),
        (losses(0.0), losses(-0.0), 1, 1, None),
        (losses(9.0, 2.0, 1.0), losses(2.0, 1.0, first=2), 3, None, None),
        (losses(1.0), losses(1.0, first=5), 0, None, None),
        (losses(), losses(1.0), 0, None, None),
    ],
)
def test_where_losses_part(ours: Columns, theirs: Columns, last: int, bits: int | None, far: int | None) -> None:
    found = parting(ours, theirs)
    assert (found.last, found.bits, found.far) == (last, bits, far)
    back = parting(theirs, ours)
    assert (back.last, back.bits, back.far) == (last, bits, far)


def test_what_is_said_of_a_parting() -> None:
    assert parting(losses(1.0, 2.0), losses(1.0, 2.0)).says == "The losses are equal to the last step both have (2), bit for bit."
    assert "part at step 1:" in parting(losses(1.0, 2.0), losses(math.nextafter(1.0, 2), 3.0)).says
    assert "At step 2 they differ by more than 0.1%" in parting(losses(1.0, 2.0), losses(math.nextafter(1.0, 2), 3.0)).says
    assert "stay within 0.1% to the last step both have (1)" in parting(losses(1.0), losses(math.nextafter(1.0, 2))).says
    assert parting(losses(), losses()).says == "There is no step that both runs have."


def test_what_differs(tmp_path: Path) -> None:
    here = read_story(full(tmp_path / "here", name="here"), "run")
    words = to_dict(compose(["recipe=tiny", "seed=2", "optimizer.lr=1e-4", "zero=stage2"]))
    there = read_story(plant(tmp_path / "there", "there", **{key: words[key] for key in ("seed", "optimizer", "zero")}), "against")
    rows = [(row.key, row.tag, row.here, row.there) for row in setting_differences(here.settings, there.settings)]
    assert ("seed", "meaning", "1", "2") in rows
    assert ("optimizer.lr", "meaning", "0.003", "0.0001") in rows
    assert ("zero.stage", "layout", "1", "2") in rows
    assert ("name", "free", "here", "there") in rows
    assert rows[-1] == ("lora", "not known here", "{'rank': 4}", ABSENT)
    tags = [tag for _, tag, _, _ in rows]
    assert tags == sorted(tags, key=["meaning", "layout", "free", "not known here"].index)
    assert setting_differences(here.settings, here.settings) == []
    assert environment_differences(here, here) == []
    places = {row.key: (row.here, row.there) for row in environment_differences(here, there)}
    assert places["hosts"] == ("here, there", ABSENT)
    assert places["command"] == ("framework/train.py recipe=tiny 'name=a b'", ABSENT)


# ---------------------------------------------------------------- the page


def test_the_head_of_the_page(tmp_path: Path) -> None:
    found = {each.label: each for each in headline(read_story(full(tmp_path / "run"), "run"))}
    assert found["steps"].value == "600"
    assert found["last held-out loss"].value == "1.9000"
    assert found["best held-out loss"].note == "step 600"
    assert found["MFU"].value == "37.5%"
    assert found["tokens/s"].value == "150"
    assert found["step time, P50"].value == "0.42 s"
    assert found["peak memory"].value == "256 MiB"
    assert found["ranks"].value == "2"


def test_everything_is_on_the_page_and_escaped(tmp_path: Path) -> None:
    text = page(read_story(full(tmp_path / "run"), "run"))
    shown = re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    for part in (
        "a &lt;b&gt;bold&lt;/b&gt; &amp; run", "A loss &lt;script&gt;alert(1)&lt;/script&gt;.", "optimizer.lr=1e-3", "aten::mm", "12.500",
        "+50.0%", "c0ffee", "back to the state of step 10", "2 checkpoints", "left aside: lora", "rank: 4", "stopped", "2026-01-02 03:04",
    ):  # fmt: skip
        assert part in shown, part
    assert "<b>bold" not in text
    assert "alert(1)</script>" not in text


def test_text_in_a_hover_box_is_escaped_and_broken_into_lines() -> None:
    rows = hover(Event(3, "alert", "<a href='x'>" + " word" * 40, "a=b")).split("<br>")
    assert len(rows) > 3
    assert all(len(row) < 90 and "<" not in row for row in rows)
    assert rows[-1].endswith("Change: a=b")


def test_no_json_ends_its_script_element() -> None:
    made = sheet.plot(json.dumps({"name": "</script><script>alert(1)</script>"}))
    assert made.count("</script>") == 1
    inside = re.search(r"json\">(.*)</script>", made)
    assert inside is not None
    assert json.loads(inside[1]) == {"name": "</script><script>alert(1)</script>"}


def test_a_long_run_makes_a_small_page(tmp_path: Path) -> None:
    lines = (train_line(step, 2.0 + (step * 7 % 11) / 10, parts=PARTS, aside_s={}) for step in range(1, 20001))
    folder = plant(tmp_path / "run", "long", lines)
    write(folder / "events.jsonl", ({**EVENTS[0], "step": step} for step in range(1, 5001)))
    text = page(read_story(folder, "run"))
    longest = sum(len(script) for script in re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL))
    assert len(text) - longest < 500_000
    assert "Of 5,000 events &#x27;checkpoint&#x27; the newest 100." in text


@pytest.mark.parametrize("lines", [None, [], [train_line(1, "nan")], [train_line(1, 2.0)]], ids=["no file", "no line", "nan", "one step"])
def test_runs_that_have_hardly_begun(lines: list[dict[str, Any]] | None, tmp_path: Path) -> None:
    young = read_story(plant(tmp_path / "run", "young", lines), "run")
    old = read_story(full(tmp_path / "old"), "against")
    assert ("has not written a step yet" in page(young)) == (not lines)
    assert "young" in page(young, old)
    assert "young" in page(old, young)
    assert "old (again)" in page(old, old)


# ---------------------------------------------------------------- the command


def test_a_real_run(tmp_path: Path) -> None:
    runs.train([*runs.PLAIN, "steps=6", "eval.every=3"], tmp_path)
    code = "import sys; from framework.report import main; assert main() == 0; assert not {'torch', 'deepspeed'} & set(sys.modules)"
    words = [sys.executable, "-c", code, "run=runs/run"]
    done = subprocess.run(words, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "runs/run/report.html\n"), done.stderr
    shown = (tmp_path / "runs" / "run" / "report.html").read_text()
    for step, loss in list(runs.losses(tmp_path / "runs" / "run").items())[-1:]:
        assert f"<b>{loss[0]:.4f}</b>" in shown
        assert f"<b>{step}</b>" in shown


def test_two_runs(tmp_path: Path) -> None:
    here, there, out = full(tmp_path / "here"), full(tmp_path / "there", name="other"), tmp_path / "new" / "both.html"
    lines = [json.loads(line) for line in (there / "metrics.jsonl").read_text().splitlines()[:-1]]
    write(there / "metrics.jsonl", ({**line, "loss": 7.0} if line["step"] == 44 else line for line in lines))
    done = start([f"run={here}", f"against={there}", f"report.out={out}"], task=report)
    assert (done.code, done.text) == (0, f"{out}\n")
    assert "The losses part at step 44" in out.read_text()
    assert not (here / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ("run\n", "framework.report run=runs/NAME")),
        (["run={tmp}/none"], ("run\n", "which is no folder")),
        (["run={tmp}"], ("run\n", "which holds no config.yaml")),
        (["run={tmp}/good", "against={tmp}/none"], ("against\n", "against=runs/NAME")),
        (["run={tmp}/good", "report.out={tmp}/good/config.yaml/x.html"], ("report.out\n", "can be written")),
        (["run={tmp}/good", "report.out={tmp}/good"], ("report.out\n", "can be written")),
        (["run={tmp}/broken"], ("run\n", "run.json")),
        (["run={tmp}/odd"], ("run\n", "holds no settings")),
        (["run={tmp}/torn"], ("run\n", "config.yaml")),
    ],
)
def test_letters(words: list[str], parts: tuple[str, ...], tmp_path: Path) -> None:
    plant(tmp_path / "good", "good")
    (plant(tmp_path / "broken", "broken") / "run.json").write_text("{")
    (plant(tmp_path / "odd", "odd") / "config.yaml").write_text("- 1\n")
    (plant(tmp_path / "torn", "torn") / "config.yaml").write_text("a: [1, ")
    done = start([word.format(tmp=tmp_path) for word in words], task=report)
    assert done.code == ConfigError.exit_code == 2
    assert_one_letter(done.text, *parts)
