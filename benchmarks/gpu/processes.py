"""Sections as processes, each in a process group that can be ended as one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.entries import Entries, gate_file, ready_file, write_atomically
from benchmarks.gpu.schedule import Section

ROOT = Path(__file__).resolve().parents[2]
LOG_CHARACTERS = 3000
"""How much of the log of a section that failed stands among its entries."""


class Settings(NamedTuple):
    """What all sections are called with."""

    device: str
    tiny: bool
    folder: Path


class SectionProcess:
    """A section that runs. Nothing that it does reaches this process, but for its files."""

    def __init__(self, section: Section, settings: Settings, seconds: float) -> None:
        self.section = section
        self.folder = settings.folder
        self.limit = seconds
        self.begin = time.monotonic()
        self.limit_begin = self.begin
        self.stop_reason = ""
        command = [sys.executable, "-m", "benchmarks.gpu"]
        command += ["--section", section.name, "--device", settings.device]
        command += ["--folder", str(settings.folder), "--seconds", str(seconds)]
        if settings.tiny:
            command.append("--tiny")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=make_environment(settings.device),
                start_new_session=True,
            )

    @property
    def log(self) -> Path:
        """The file that holds all that the section prints."""
        return self.folder / f"{self.section.name}.log"

    def is_over(self) -> bool:
        """Returns whether the process has ended, after ending it where its time is over."""
        if self.process.poll() is not None:
            return True
        if time.monotonic() - self.limit_begin > self.limit:
            self.stop(f"it took longer than {self.limit:.0f} s")
            return True
        return False

    def is_ready(self) -> bool:
        """Returns whether a prepared section waits for its turn."""
        return ready_file(self.folder, self.section.name).exists()

    def give_turn(self, seconds: float) -> None:
        """Lets a prepared section go on, for so many seconds."""
        self.limit_begin = time.monotonic()
        self.limit = seconds
        # The section stops a little earlier by itself, with all its entries.
        write_atomically(gate_file(self.folder, self.section.name), str(seconds - 2))

    def stop(self, reason: str) -> None:
        """Ends the process and all that it started."""
        self.stop_reason = reason
        self.end_leftovers()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)

    def end_leftovers(self) -> None:
        """Ends what a section that has ended has left running, such as workers of a compiler."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def read_entries(self) -> Entries:
        """Returns the entries so far, how long the process took, and why it failed if it did."""
        entries: Entries = {}
        file = self.folder / f"{self.section.name}.json"
        with contextlib.suppress(FileNotFoundError, ValueError):
            entries |= json.loads(file.read_text())
        status: Any = self.process.returncode
        seconds = round(time.monotonic() - self.begin, 1)
        entries |= {"seconds": seconds, "status": status}
        if self.stop_reason:
            entries |= {"error": self.stop_reason}
        elif status:
            entries.setdefault("error", f"the process ended with status {status}")
        if self.stop_reason or status:
            entries["log"] = self.log.read_text(errors="replace")[-LOG_CHARACTERS:]
        return entries


def make_environment(device: str) -> dict[str, str]:
    """Returns the environment of a section."""
    path = os.environ.get("PYTHONPATH", "")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), path]) if path else str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PURESTEP_DEVICE": device,
        "HF_HUB_OFFLINE": "1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    environment.setdefault("OMP_NUM_THREADS", "2" if device == "cuda" else "1")
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "6")
    # All ranks are on this machine, which may have no other interface.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment.setdefault("NCCL_SOCKET_IFNAME", "lo")
    return environment
