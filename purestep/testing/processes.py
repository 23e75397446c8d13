"""Runs functions on real ranks: processes of one gloo group."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

CONTEXT = get_context("forkserver")
IMPORTED = ["torch._dynamo", "torch.distributed.tensor.debug", "pytest"]
"""What takes seconds to import: ranks are forked from a process that has done so."""


class DeadRankError(RuntimeError):
    """Reports a process that has ended, with its exit code, instead of answering."""


class World:
    """Keeps ``size`` processes of one gloo group for as long as the context lasts.

    None outlives it. Results are pickled, exceptions like any other.

    Args:
        size: how many ranks.
        timeout: the seconds that ``run`` may take.
        strict: whether a warning in a rank is an error. Two warnings of torch's are ignored.
        imported: modules that all ranks have imported, at the cost of one. The first world decides.
    """

    def __init__(
        self,
        size: int,
        timeout: float = 60.0,
        *,
        strict: bool = True,
        imported: Sequence[str] = IMPORTED,
    ) -> None:
        self.size = size
        self.timeout = timeout
        self.strict = strict
        self.imported = imported

    def __enter__(self) -> World:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the processes, without waiting until they have joined their group.

        It makes a temporary folder, in which they meet; ``stop`` removes it.
        """
        CONTEXT.set_forkserver_preload([*self.imported])
        self._folder = tempfile.TemporaryDirectory()
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        store = f"{self._folder.name}/store"
        for rank in range(self.size):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=_serve,
                args=(rank, self.size, store, theirs, self.strict),
                daemon=True,
            )
            process.start()
            # Only the process holds that end now: when it ends, we read an EOFError.
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Sequence[Any]) -> list[Any]:
        """Calls ``function(rank, *args of this rank)`` on every rank.

        Each of ``args`` has a value for each rank. Function and arguments are pickled. Returns, in
        order of rank, what each call returns or raises, or a ``DeadRankError``. A ``RuntimeError``
        stands for an exception that cannot be pickled, with its text, and for a result that cannot
        be loaded. A rank that raises ends, as a program would. The next run then starts new
        processes for all ranks.

        Raises ``ValueError`` if ``args`` have another length than there are ranks. Raises
        ``TimeoutError`` after ``timeout`` seconds, and ends all processes.
        """
        rank_args: list[Any] = [()] * self.size
        if args:
            rank_args = list(zip(*args, strict=True))
        if len(rank_args) != self.size:
            raise ValueError(
                f"World({self.size}).run has arguments for {len(rank_args)} ranks: pass a value "
                "for each rank"
            )
        # Before any rank computes: arguments of a later rank may fail.
        calls = [pickle.dumps((function, call_args)) for call_args in rank_args]
        if not all(process.is_alive() for process in self._processes):
            self.stop()
            self.start()
        for connection, call in zip(self._connections, calls, strict=True):
            connection.send_bytes(call)
        deadline = time.monotonic() + self.timeout
        results: list[Any] = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                results += self._receive_available()
                self.stop()
                raise TimeoutError(
                    f"rank {rank} is silent after {self.timeout} s; said: {results}"
                )
            results.append(self._receive(rank))
        return results

    def _receive_available(self) -> list[Any]:
        return [
            self._receive(rank)
            for rank, connection in enumerate(self._connections)
            if connection.poll()
        ]

    def _receive(self, rank: int) -> Any:
        process = self._processes[rank]
        try:
            message = self._connections[rank].recv_bytes()
        except (EOFError, ConnectionError):
            process.join(self.timeout)
            return DeadRankError(process.exitcode)
        try:
            has_raised, result = pickle.loads(message)
        except Exception as error:
            # Raised here, it would leave the answers of later ranks to the next run.
            return RuntimeError(f"rank {rank}'s result cannot be loaded: {error!r}")
        if has_raised:
            process.join(self.timeout)
        return result

    def stop(self) -> None:
        """Kills the processes, waits for their end, and removes their files."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()


def values(results: Sequence[Any]) -> list[Any]:
    """Returns the results of ranks; raises ``AssertionError`` if any of them is an exception."""
    failed = {
        rank: result
        for rank, result in enumerate(results)
        if isinstance(result, BaseException)
    }
    for error in failed.values():
        raise AssertionError(f"ranks failed: {failed}") from error
    return list(results)


def _serve(
    rank: int, size: int, store: str, connection: Connection, strict: bool
) -> None:
    """Joins the gloo group, and then runs each function that it receives, and sends the result.

    If a function raises an ``Exception`` or cannot be loaded, it sends the exception, with its
    traceback as a note, and ends the process. So it does if the result cannot be pickled. An
    exception that cannot be pickled is sent as ``_pickle_error`` says. With
    ``strict``, warnings are errors, but for two of torch's. In this process torch computes on one
    thread.
    """
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
    )
    while True:
        message = connection.recv_bytes()
        try:
            function, args = pickle.loads(message)
            with warnings.catch_warnings():
                _filter_warnings(strict)
                result = function(rank, *args)
            answer = pickle.dumps((False, result))
        except Exception as error:
            error.add_note(f"on rank {rank}:\n{traceback.format_exc()}")
            connection.send_bytes(_pickle_error(error))
            os._exit(1)
        connection.send_bytes(answer)


def _filter_warnings(strict: bool) -> None:
    warnings.simplefilter("error" if strict else "default")
    # Of torch itself, as in pyproject.toml.
    warnings.filterwarnings("ignore", "`torch.jit.script")
    warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")


def _pickle_error(error: Exception) -> bytes:
    """Pickles ``(True, error)``, which tells an exception that was raised from one returned.

    An error that cannot be pickled and loaded becomes a ``RuntimeError`` of its text and its notes.
    Such an error must have notes.
    """
    try:
        pickled = pickle.dumps((True, error))
        pickle.loads(pickled)
        return pickled
    except Exception:
        # Errors of torch 2.11's compiler hold what it traced: "cannot pickle 'cell' object". Errors
        # whose __init__ takes several arguments can be pickled, but not loaded.
        text = "\n".join([str(error), *error.__notes__])
        return pickle.dumps((True, RuntimeError(text)))
