"""Runs Python programs in processes that are forked from one that has imported torch.

A new interpreter takes three seconds to import torch and its compiler. A fork takes none of them. The
program has its own arguments, folder, variables, output, and exit status. But modules have been
imported, functions of ``atexit`` do not run, and what Python and torch read from variables as they
start is that of the tests. Programs for which that matters run in a new interpreter.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from purestep.testing.processes import CONTEXT, IMPORTED


class Command(NamedTuple):
    """Describes a run of ``python *arguments`` in ``folder``.

    The arguments begin with ``-m MODULE`` or ``-c PROGRAM``. ``stdout`` and ``stderr`` are files.
    """

    arguments: Sequence[str]
    folder: Path
    variables: Mapping[str, str]
    stdout: Path
    stderr: Path


class Program:
    """Starts a program; has the methods of ``subprocess.Popen`` by which one waits and sends signals."""

    def __init__(self, command: Command) -> None:
        command.stdout.touch()
        command.stderr.touch()
        CONTEXT.set_forkserver_preload([*IMPORTED])
        self.arguments = command.arguments
        self._process = CONTEXT.Process(target=_run, args=(command,))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Returns the exit status; None while the program runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Waits for the end, and returns the exit status: minus the signal by which it ended, if any.

        Raises ``subprocess.TimeoutExpired`` after ``timeout`` seconds.
        """
        self._process.join(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(list(self.arguments), timeout)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_program(
    arguments: Sequence[str],
    folder: Path,
    variables: Mapping[str, str] | None = None,
    timeout: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Runs ``python *arguments`` to its end, as ``subprocess.run`` does, and captures its output.

    The arguments begin with ``-m`` or ``-c``, and ``variables`` are added to the environment.
    Raises ``subprocess.TimeoutExpired`` after ``timeout`` seconds, and kills the program.
    """
    with tempfile.TemporaryDirectory() as outputs:
        stdout = Path(outputs, "stdout")
        stderr = Path(outputs, "stderr")
        env = {**os.environ, **(variables or {})}
        program = Program(Command(arguments, folder, env, stdout, stderr))
        try:
            status = program.wait(timeout)
        finally:
            program.kill()
        return subprocess.CompletedProcess(
            arguments,
            status,
            stdout.read_text(encoding="utf-8"),
            stderr.read_text(encoding="utf-8"),
        )


def _run(command: Command) -> None:
    """Makes the process what a new interpreter would be, and runs the program in it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for path, number in ((command.stdout, 1), (command.stderr, 2)):
        file = os.open(path, os.O_WRONLY | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    # Python's default, not that of the process from which this one is forked.
    multiprocessing.set_start_method(None, force=True)
    os.environ.clear()
    os.environ.update(command.variables)
    os.chdir(command.folder)
    sys.path[:0] = command.variables.get("PYTHONPATH", "").split(os.pathsep)
    option, program, *arguments = command.arguments
    if option == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = [program, *arguments]
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [option, *arguments]
        exec(program, {"__name__": "__main__"})
