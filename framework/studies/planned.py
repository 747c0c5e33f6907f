"""What framework.plan says: one layout judged, or all of them searched, tried on this machine, and the first written as a recipe."""

from __future__ import annotations

import datetime
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from framework.base.errors import ConfigError
from framework.base.files import write_atomic
from framework.config.schema import Config
from framework.launch.command import Places
from framework.planner import page, recipe
from framework.planner.advice import Judge, Judged
from framework.planner.cost import seconds
from framework.planner.hardware import Site, named
from framework.planner.search import Findings, Found, Search


class Study:
    """One call of the program. Raises ConfigError for words of `plan` that do not go together."""

    def __init__(self, config: Config, there: Places) -> None:
        """`there` are the ranks planned for."""
        self.config, self.there = config, there
        self.site = Site(named(config.plan.hardware), there.ranks_per_host)
        self.judge = Judge(there.ranks, self.site)
        self._refuse()

    def run(self) -> str:
        """What to print."""
        plan = self.config.plan
        if not plan.search:
            now = self.judge.judge(self.config)
            return self._said(now, {}, "")
        findings = Search(self.config, self.there.ranks, self.site).run()
        findings.found[: plan.show] = self._exact(findings)
        more, text = page.search_facts(findings, plan.show, plan.explain), page.search_text(findings, plan.show, plan.explain)
        if not findings.found:
            return json.dumps(more, indent=2) if plan.format == "json" else text
        best = findings.found[0]
        if plan.probe:
            best, probed, said = self._probe(findings)
            more, text = {**more, "probe": probed}, f"{text}\n\n{said}"
        now = self.judge.judge(best.layout.of(self.config))
        if plan.write is not None:
            text += f"\n\nwritten   {self._write(now, Path(plan.write))}"
        return self._said(now, more, text)

    def _said(self, now: Judged, more: dict[str, Any], text: str) -> str:
        advice = self.judge.advise(now)
        built = self._build(now) if self.config.plan.build else None
        if self.config.plan.format == "json":
            return json.dumps({**page.facts(now, self.site, advice), **more, **({"build": built} if built else {})}, indent=2)
        said = [page.text(now, self.site, advice), *([text] if text else [])]
        said += [f"build     {built['text']}"] if built else []
        return "\n\n".join(said)

    def _exact(self, findings: Findings) -> list[Found]:
        """Of the first ones those whose Ledger, reckoned for every stage, fits."""
        first = findings.found[: self.config.plan.show]
        return [found for found in first if not self.judge.judge(found.layout.of(self.config)).reason]

    def _probe(self, findings: Findings) -> tuple[Found, list[dict[str, Any]], str]:
        """The fastest of the first ones as measured."""
        from framework.studies.probe import PROBE_STEPS, measure

        tried = findings.found[: self.config.plan.probe]
        took = [measure(found.layout.of(self.config), self.there.ranks, f"layout_{at}") for at, found in enumerate(tried, start=1)]
        facts = [
            {**page.found_facts(found), "measured": each, "measured_over_estimate": each / found.seconds}
            for found, each in zip(tried, took, strict=True)
        ]
        lines = [f"measured  {PROBE_STEPS} steps each on this machine, median", f"  {'estimate':>9} {'measured':>9}"]
        lines += [f"  {found.seconds:>9.4f} {each:>9.4f}  {page.describe(found.layout)}" for found, each in zip(tried, took, strict=True)]
        return tried[min(range(len(tried)), key=took.__getitem__)], facts, "\n".join(lines)

    def _build(self, now: Judged) -> dict[str, Any]:
        from framework.studies.outlines import hold_against_ledger

        return hold_against_ledger(now.config, now.grid)

    def _write(self, now: Judged, path: Path) -> str:
        name = recipe.name_of(path)
        hosts = -(-self.there.ranks // self.there.ranks_per_host)
        goal = f"The fastest layout of {self.config.name} on {self.there.ranks} ranks that fits, by framework.plan."
        where = f"{self.there.ranks} x {self.site.hardware.name}, {self.there.ranks_per_host} on a host"
        expected = f"{seconds(now.time):.3g} s per step, {now.ledger.total / 1e9:.3g} GB per rank on paper; not measured"
        header = recipe.Header(goal, where, self.there.ranks, hosts, expected, datetime.date.today().isoformat())
        write_atomic(path, recipe.recipe_text(replace(now.config, name=name), name, header).encode())
        return str(path)

    def _refuse(self) -> None:
        plan = self.config.plan
        if plan.write is not None:
            recipe.name_of(Path(plan.write))
        if plan.probe and (not self.site.hardware.shared or self.there.ranks > self.there.ranks_per_host):
            raise ConfigError("plan.probe", f"{plan.probe} with plan.hardware {plan.hardware}", "this machine", "plan.hardware=auto")
