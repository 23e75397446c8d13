"""Runs sections in their order within the time, and writes results after each."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.entries import (
    Entries,
    describe_error,
    dump,
    find_errors,
    write_atomically,
)
from benchmarks.gpu.processes import SectionProcess, Settings
from benchmarks.gpu.report import make_table
from benchmarks.gpu.schedule import Section, in_phase, time_limit

LOG_CHARACTERS = 2**18
"""How much of each section's log is written."""

SECONDS_BETWEEN_WRITES = 5.0


def describe_results(results: Entries) -> str:
    """Returns the table; an error of the table is no reason to lose the results."""
    try:
        return make_table(results)
    except Exception as error:
        return describe_error(error)


class Orchestrator:
    """Starts, watches and ends the processes of sections.

    Args:
        settings: what the sections are called with.
        out: the folder of the results.
        seconds: how long all sections may take.
        jobs: how many of those that run together may run at once.
        slowness: what limits of sections are multiplied by.
    """

    def __init__(
        self, settings: Settings, out: Path, seconds: float, jobs: int, slowness: float
    ) -> None:
        self.settings = settings
        self.out = out
        self.seconds = seconds
        self.jobs = jobs
        self.slowness = slowness
        self.copies: list[Path] = []
        self.begin = time.monotonic()
        self.last_written = self.begin
        self.results: Entries = {"device": settings.device, "tiny": settings.tiny}
        self.processes: dict[str, SectionProcess] = {}
        self.sections: list[Section] = []
        out.mkdir(parents=True, exist_ok=True)

    def spent(self) -> float:
        """Returns the seconds since the start."""
        return time.monotonic() - self.begin

    def run(self, sections: Sequence[Section]) -> None:
        """Runs them all: one first, many together, the others alone."""
        self.sections = [*sections]
        for section in in_phase(sections, "first"):
            self.run_alone(section)
        self.run_together(in_phase(sections, "together", "prepared"))
        for section in in_phase(sections, "alone", "prepared"):
            self.run_alone(section)

    def start(self, section: Section) -> SectionProcess | None:
        """Starts a section if there is time for it."""
        limit = time_limit(section.limit * self.slowness, self.spent(), self.seconds)
        if limit is None:
            self.results[section.name] = {"skipped": "no time was left"}
            return None
        process = SectionProcess(section, self.settings, limit)
        self.processes[section.name] = process
        return process

    def run_together(self, sections: Sequence[Section]) -> None:
        """Runs sections side by side, until each has ended or is prepared."""
        waiting = [*sections]
        running: list[SectionProcess] = []
        while waiting or running:
            while waiting and len(running) < self.jobs:
                process = self.start(waiting.pop(0))
                if process is not None:
                    running.append(process)
            for process in [*running]:
                if process.is_over():
                    running.remove(process)
                    self.finish(process)
                elif process.is_ready():
                    running.remove(process)
                    process.limit = math.inf  # Others may take minutes before its turn.
                    self.write()
            self.pause()

    def run_alone(self, section: Section) -> None:
        """Runs a section, or gives a prepared one its turn, until it ends."""
        process = self.processes.get(section.name)
        if section.phase == "prepared":
            if process is None or section.name in self.results:
                return
            wanted = section.turn * self.slowness
            limit = time_limit(wanted, self.spent(), self.seconds)
            if limit is None:
                process.stop("no time was left for its turn")
                self.finish(process)
                return
            process.give_turn(limit)
        else:
            process = self.start(section)
        while process is not None and not process.is_over():
            self.pause()
        if process is not None:
            self.finish(process)

    def pause(self) -> None:
        """Sleeps a little; now and then writes what there is, in case this process is killed."""
        time.sleep(0.05)
        if time.monotonic() - self.last_written > SECONDS_BETWEEN_WRITES:
            self.write()

    def finish(self, process: SectionProcess) -> None:
        """Takes the entries of a section that has ended, and writes all results."""
        name = process.section.name
        process.end_leftovers()
        entries = process.read_entries()
        self.results[name] = entries
        errors = len(find_errors(entries))
        print(f"-- {name}: {entries['seconds']} s, {errors} errors", flush=True)
        self.write()

    def stop_all(self) -> None:
        """Ends what still runs, and writes what it has found."""
        self.results["seconds"] = round(self.spent(), 1)
        running = [
            process for process in self.processes.values() if not process.is_over()
        ]
        for process in running:
            process.end_leftovers()
        self.write()
        for process in running:
            process.stop("the program ended before this section")
            self.finish(process)
        self.write()

    def write(self) -> None:
        """Writes results, their table, and the logs of all sections."""
        self.last_written = time.monotonic()
        names = [section.name for section in self.sections]
        running = {
            name: process.read_entries()
            for name, process in self.processes.items()
            if name not in self.results
        }
        results = {**self.results, **running, "sections": names}
        text = dump(results)
        for path in [self.out / "gpu.json", *self.copies]:
            write_atomically(path, text)
        write_atomically(self.out / "gpu.md", describe_results(results) + "\n")
        logs = [
            f"===== {name}\n{process.log.read_text(errors='replace')[-LOG_CHARACTERS:]}"
            for name, process in self.processes.items()
        ]
        write_atomically(self.out / "gpu.log", "\n".join(logs))

    def print_summary(self) -> int:
        """Prints the table and every error; returns the exit status."""
        print(describe_results(self.results))
        errors = find_errors(self.results)
        for path, error in errors.items():
            print(f"{path}: {error}")
        print(
            f"{self.results['seconds']} s, {len(errors)} errors: {self.out / 'gpu.json'}"
        )
        return 1 if errors else 0
