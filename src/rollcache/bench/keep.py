"""What is kept of a run and said about it, whatever ends it: its last scenario, Ctrl-C, or a full disk.

The numbers are written first, then what hangs on them, so that an end in between costs the least.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from rollcache.bench import tables
from rollcache.bench.compare import MeasuringStopped, Outcome
from rollcache.measure import WriteError, write_atomic

if TYPE_CHECKING:
    from rollcache.bench.progress import Narrator
    from rollcache.bench.results import Results

INTERRUPTED = 130


@dataclass
class Ending:
    """How a run ended: `stopped` by Ctrl-C, `failed` to write a file, or neither."""

    stopped: bool = False
    failed: OSError | None = None

    @property
    def early(self) -> bool:
        """Nothing more may be started."""
        return self.stopped or self.failed is not None


def keep(results: Results, scenario: str, work: Callable[[], Outcome], narrator: Narrator) -> Ending:
    """Do the work of one scenario and keep what comes of it; never raises for Ctrl-C or a file that cannot be written.

    Args:
        results: takes the result, and is written as soon as it has it.
        scenario: its name.
        work: generates and measures.
        narrator: tells what is done.
    """
    ending = Ending()
    try:
        outcome = work()
        results.scenarios[scenario] = outcome.result
        ending.stopped = outcome.interrupted
        with _where("the tables above have the numbers"):
            results.save()
        if results.reports and results.folder is not None:
            from rollcache.bench.report import media

            narrator.stage("videos and figures")
            with _where(f"the numbers are in {results.path}, and files written before are whole"):
                outcome.result["media"] = media(outcome, results.folder, scenario)
                results.save()
        narrator.done(tables.headline(outcome.result))
    except MeasuringStopped as stop:
        ending.stopped = True
        try:
            _keep_generated(results, scenario, stop)
        except KeyboardInterrupt:
            narrator.say(f"{scenario}: Ctrl-C once more, the latents were not written")
        except OSError as error:
            ending.failed = error
    except KeyboardInterrupt:
        ending.stopped = True
    except WriteError as error:
        ending.failed = error
    return ending


def finish(results: Results, ending: Ending) -> int:
    """Print the tables, then write the file and the report, say what is kept.

    Returns:
        The exit code.

    Raises:
        WriteError: something could not be written; the tables are printed then.
    """
    console = Console(width=None if sys.stdout.isatty() else 150)
    show(console, results)
    try:
        if ending.failed is not None:
            raise ending.failed
        _write_rest(results, console)
    except KeyboardInterrupt:
        ending.stopped = True
    if not ending.stopped:
        return 0
    Console(stderr=True).print(f"interrupted: {kept(results)}", highlight=False, markup=False, soft_wrap=True)
    return INTERRUPTED


def show(console: Console, results: Results) -> None:
    """The tables, and a line for every scenario that has times and no fidelity."""
    if results.scenarios:
        console.print(tables.main_table(results.scenarios))
        if any(s["controls"] or s["floor"] for s in results.scenarios.values()):
            console.print(tables.controls_table(results.scenarios))
        for note in tables.notes(results.scenarios):
            console.print(note, style="dim", highlight=False)
    for name, known in results.generated.items():
        timing = known["timing"]
        console.print(
            f"{name}: {tables.times(timing['speedup'])}, {tables.percent(timing['skip_rate'])} skipped in "
            f"{known['counted']}; fidelity was not measured",
            highlight=False,
        )


def kept(results: Results) -> str:
    """What an interrupted run leaves behind, in one line."""
    said = []
    for name, s in results.scenarios.items():
        notes = [f"{s['chunks']} chunks"] if s["interrupted"] else []
        if s.get("unmeasured"):
            notes.append(f"without {', '.join(s['unmeasured'])}")
        said.append(f"{name} ({', '.join(notes)})" if notes else name)
    for name, known in results.generated.items():
        latents = f", latents in {known['latents']}" if "latents" in known else ""
        said.append(f"{name} ({known['chunks']} chunks, generated but not measured: times and decisions{latents})")
    if not said:
        return "nothing was finished yet, no results"
    what = "results" if results.measured else "partial results"
    where = "shown above" if results.path is None else f"kept in {results.path}"
    left = f"; {results.unfinished} unfinished" if results.unfinished else ""
    return f"{what} {where}: {', '.join(said)}{left}"


def _write_rest(results: Results, console: Console) -> None:
    """The file once more, since Ctrl-C may have hit its last writing, then the report."""
    if results.path is None or not (results.scenarios or results.generated):
        return
    with _where("the tables above have the numbers"):
        results.save()
    console.print(f"results  {results.path}", highlight=False, soft_wrap=True)
    if results.reports and results.folder is not None and results.scenarios:
        from rollcache.bench.report import write_report

        with _where(f"the numbers are in {results.path}; make the report with rollcache report {results.folder}"):
            done = replace(results, reported=True)  # what the page says, and the file once the page is there
            page = write_report(done.to_dict(), results.folder)
            done.save()
            results.reported = True
        console.print(f"report   {page}", highlight=False, soft_wrap=True)


def _keep_generated(results: Results, scenario: str, stop: MeasuringStopped) -> None:
    """Times and decisions go into the result file, latents beside it."""
    known: dict[str, Any] = stop.known
    results.generated[scenario] = known
    if results.path is None:
        return
    with _where("the times are above"):
        results.save()
    from safetensors.torch import save

    target: Path = (results.folder or results.path.parent) / f"{scenario}-latents.safetensors"
    with _where(f"times and decisions are in {results.path}"):
        write_atomic(target, save({key: x.contiguous().cpu() for key, x in stop.latents.items()}))
        known["latents"] = target.name
        results.save()


@contextmanager
def _where(numbers: str) -> Iterator[None]:
    """Add to a failure to write where the numbers are."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        named = f"{error.filename}: {reason}" if error.filename else reason
        raise WriteError(error.errno, f"{named}; {numbers}") from error
