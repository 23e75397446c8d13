"""Compiled updates of random losses on the device, beside eager ones."""

from __future__ import annotations

import multiprocessing
import warnings
from concurrent.futures import (
    Executor,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    as_completed,
)

from benchmarks.gpu.entries import FALLBACK, Run, describe_error
from benchmarks.random_losses import WAYS, compare, draw_loss

SEEDS = [1, 10, 15, 22, 29, 35, 39]
"""Losses whose updates plain ``torch.compile`` computes wrong on a CPU, by torch 2.13."""

SPARE_SECONDS = 5
"""The section ends so long before its limit."""

NUM_PROCESSES = 4
"""How many compile at once. Nearly all of the time is compilation."""


def run_losses(run: Run) -> None:
    """Compares each loss in each way while there is time; in a tiny run, eager with itself."""
    ways = ["eager"] if run.tiny else WAYS
    paths = [(seed, way) for seed in SEEDS for way in ways]
    pool = make_pool(run)
    futures = {pool.submit(compare_compiled, *path, run.device): path for path in paths}
    try:
        for future in as_completed(futures, timeout=run.seconds_left() - SPARE_SECONDS):
            seed, way = futures[future]
            with run.attempt(f"loss {seed}", way):
                distance, is_wrong = future.result()
                run.add(f"loss {seed}", way, distance=distance)
                run.check(f"loss {seed}", way, right=not is_wrong)
            del futures[future]
    except TimeoutError:
        for seed, way in futures.values():
            run.add(f"loss {seed}", way, skipped="no time was left")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()


def make_pool(run: Run) -> Executor:
    """Returns processes, each with a compiler; for a tiny run, which compiles nothing, a thread."""
    if run.tiny:
        return ThreadPoolExecutor(1)
    return ProcessPoolExecutor(
        NUM_PROCESSES, mp_context=multiprocessing.get_context("spawn")
    )


def compare_compiled(seed: int, way: str, device: str) -> tuple[float, bool]:
    """Compares an update of a random loss with the eager one.

    Raises ``RuntimeError`` if it makes no graph. Processes cannot hand on the compiler's errors.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{FALLBACK}")
        try:
            return compare(draw_loss(seed), way, device)
        except Exception as error:
            raise RuntimeError(describe_error(error)) from None
