"""The work of a study: every job on every clip that has no result yet, shared between processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from rollcache.bench.lanes import Plan
from rollcache.bench.results import dump
from rollcache.bench.steps.clips import Clip, FullCompute, Reference
from rollcache.bench.steps.match import Match
from rollcache.bench.steps.measure import evaluate
from rollcache.bench.steps.methods import Method
from rollcache.bench.steps.study import Job, Study
from rollcache.measure.provenance import plain, revision

if TYPE_CHECKING:
    from rollcache.bench.progress import Narrator


PARTS = ("decisions", "speed", "fidelity")  # of a result: what was measured


class Worker:
    """Runs jobs on clips, one at a time.

    Args:
        study: it.
        matches: knobs by the key of their method, and target.
        narrator: tells what is done.
    """

    def __init__(self, study: Study, matches: dict[str, dict[float, Match]], narrator: Narrator) -> None:
        self._study, self._matches, self._narrator = study, matches, narrator
        self._full = FullCompute(study.world, study.protocol, study.folder, windows=study.windows, draw=study.draw)
        self._revision = revision()

    def run(self, work: Sequence[tuple[Clip, Sequence[Job]]]) -> int:
        """Do what is not done yet; returns the number of results that were made here.

        Whole clips are shared out first; where another process is at a clip, its jobs are shared at the end.
        """
        made = 0
        for whole in (True, False):
            for clip, wanted in work:
                with self._study.folder.lock(f"clip-{clip}") if whole else nullcontext(True) as mine:
                    if mine:
                        made += self._clip(clip, wanted)
        return made

    def _clip(self, clip: Clip, wanted: Sequence[Job]) -> int:
        left = [job for job in wanted if not self._done(clip, job)]
        if not left:
            return 0
        made = 0
        reference: Reference | None = None
        self._narrator.begin(str(clip), len(left))
        for count, job in enumerate(left):
            with self._study.folder.lock(f"{clip}-{job.name}") as mine:
                if not mine or self._done(clip, job):
                    continue
                if reference is None:
                    reference = self._full.of(clip, self._narrator.stage)
                self._narrator.units(count, job.name)
                self._one(clip, job, reference)
                made += 1
        if made:
            self._narrator.done(f"{made} of {len(left)} results")
        return made

    def _one(self, clip: Clip, job: Job, reference: Reference) -> None:
        study, plan = self._study, self._plan(job)
        assert self._full.seconds is not None
        found = self._twin(clip, job) or evaluate(
            study.world, reference, study.protocol, plan, study.price, self._full.seconds
        )
        match = self._match(job)
        known = {
            "job": job.name,
            "method": job.method.key,
            "label": job.method.label,
            "group": job.method.group,
            "target": job.target,
            "knob": None if job.method.follows else {"name": _knob_name(job.method), "value": match.knob},
            "match": {"speedup": match.speedup, "note": "" if job.method.follows else match.note},
            "clip": str(clip),
            "windows": study.windows,
            "settings": _settings(plan),
            "revision": self._revision,
        }
        study.folder.write(self._path(clip, job), {**known, **found})

    def _twin(self, clip: Clip, job: Job) -> dict[str, Any] | None:
        """What the same method with the same settings did at another target, where one setting is nearest to both."""
        settings = _settings(self._plan(job))
        for target in self._matches[job.method.follows or job.method.key]:
            known = self._study.folder.read(self._path(clip, Job(job.method, target)))
            if known is not None and known["settings"] == settings:
                return {part: known[part] for part in PARTS}
        return None

    def _done(self, clip: Clip, job: Job) -> bool:
        """Whether there is a result with the very same settings."""
        known = self._study.folder.read(self._path(clip, job))
        return known is not None and known.get("settings") == _settings(self._plan(job))

    def _plan(self, job: Job) -> Plan:
        return job.method.plan(self._match(job).knob)

    def _match(self, job: Job) -> Match:
        return self._matches[job.method.follows or job.method.key][job.target]

    def _path(self, clip: Clip, job: Job) -> str:
        return f"runs/{clip}/{job.name}.json"


def _settings(plan: Plan) -> Any:
    """Settings as a result file has them."""
    policy = None if plan.policy is None else {"type": type(plan.policy).__name__, **plain(plan.policy)}
    return json.loads(dump({"steps": plan.steps, "solver": plan.solver, "policy": policy}))


def _knob_name(method: Method) -> str:
    return "" if method.knob is None else method.knob.name
