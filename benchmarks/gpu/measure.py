"""How sections measure: time on the device and on the host, kernels, waits and memory."""

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.entries import Run

Call = Callable[[], object]

LAUNCHES = (
    "cudaLaunchKernel",
    "cuLaunchKernel",
    "cudaGraphLaunch",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
)
"""How the calls begin that give a CUDA device something to do."""

SYNCHRONISATIONS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
)
LONGEST = 8


def synchronise(run: Run) -> None:
    """Waits until the device has nothing to do."""
    if run.is_cuda:
        torch.cuda.synchronize()


def free_memory(run: Run) -> None:
    """Gives back what nobody uses."""
    gc.collect()
    if run.is_cuda:
        torch.cuda.empty_cache()


def time_calls(
    run: Run, call: Call, *, seconds: float = 0.35, blocks: int = 5
) -> dict[str, Any]:
    """Returns milliseconds of one call: the median of some blocks, the least and the most.

    ``host_ms`` is what the host takes to queue one call on an idle device.
    """
    if run.tiny:
        seconds, blocks = 0.01, 2
    call()
    once = measure_block(run, call, 1).total
    number = max(2, min(200, int(seconds / max(once, 1e-6))))
    results = [measure_block(run, call, number) for _ in range(blocks)]
    totals = [block.total for block in results]
    queued = [measure_block(run, call, 1).queued for _ in range(3)]
    return {
        "ms": to_ms(statistics.median(totals), number),
        "least_ms": to_ms(min(totals), number),
        "most_ms": to_ms(max(totals), number),
        "host_ms": to_ms(statistics.median(queued), 1),
        "calls": number * blocks,
    }


class Block(NamedTuple):
    """Seconds of some calls in a row."""

    queued: float
    """Until the last call has returned."""
    total: float
    """Until the device has finished."""


def measure_block(run: Run, call: Call, number: int) -> Block:
    """Times so many calls in a row."""
    synchronise(run)
    begin = time.perf_counter()
    for _ in range(number):
        call()
    queued = time.perf_counter() - begin
    synchronise(run)
    return Block(queued, time.perf_counter() - begin)


def to_ms(seconds: float, number: int) -> float:
    """Returns milliseconds of one of so many calls."""
    return round(1000 * seconds / number, 4)


def measure_peak(run: Run, call: Call) -> dict[str, float]:
    """Returns the most memory that the device holds during a call, and what it holds before."""
    if not run.is_cuda:
        call()
        return {}
    gc.collect()
    synchronise(run)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    synchronise(run)
    peak = torch.cuda.max_memory_allocated()
    return {"peak_mib": round(peak / 2**20, 1), "before_mib": round(before / 2**20, 1)}


def find_waits(run: Run, call: Call) -> list[str]:
    """Returns where a call makes the host wait for the device; nowhere, on a CPU."""
    if run.device == "cpu":
        call()
        return []
    # Only here, since it brings the whole of the proofs.
    from support.devices import Waits

    with Waits() as waits:
        call()
    return [shorten(name) for name in waits.seen]


def shorten(path: str) -> str:
    """Returns the end of a path.

    >>> shorten("/a/purestep/optim/base.py:12")
    'optim/base.py:12'
    """
    return "/".join(path.split("/")[-2:])


class Range(NamedTuple):
    """An event of the profiler, on the host's clock."""

    name: str
    begin: float
    end: float


def count_launches(run: Run, call: Call) -> dict[str, Any]:
    """Returns how many kernels and copies a call launches, their time, and where the host waits.

    On a CPU, operations stand for kernels. ``in_ranges`` counts launches within purestep's ranges.
    """
    activities = [ProfilerActivity.CPU]
    if run.is_cuda:
        activities.append(ProfilerActivity.CUDA)
    synchronise(run)
    with profile(activities=activities) as profiler:
        call()
        synchronise(run)
    events: Any = profiler.events()
    on_host = [make_range(event) for event in events if is_on_host(event)]
    ranges = [event for event in on_host if event.name.startswith("purestep.")]
    launch_names = LAUNCHES if run.is_cuda else ("aten::",)
    launches = [event for event in on_host if event.name.startswith(launch_names)]
    counts: dict[str, Any] = {
        "launches": len(launches),
        "ranges": sorted({event.name for event in ranges}),
        "in_ranges": count_in_ranges(launches, ranges),
    }
    if run.is_cuda:
        synchronisations = [
            e.name for e in on_host if e.name.startswith(SYNCHRONISATIONS)
        ]
        waits = [name for name in synchronisations if not name.startswith(LAUNCHES)]
        counts["synchronisations"] = dict(Counter(waits))
        on_device = [event for event in events if not is_on_host(event)]
        # Ranges of the host are shown on the device, too, under the names of Triton's kernels.
        counts |= sum_kernels(e for e in on_device if not e.is_user_annotation)
    return counts


def is_on_host(event: Any) -> bool:
    """Returns whether an event of the profiler happens on the host."""
    return str(event.device_type).endswith("CPU")


def make_range(event: Any) -> Range:
    """Returns the name and the times of an event of the profiler."""
    return Range(event.name, event.time_range.start, event.time_range.end)


def count_in_ranges(launches: list[Range], ranges: list[Range]) -> dict[str, int]:
    """Returns how many launches begin within the ranges of each name.

    >>> launches = [Range("a", 1, 2), Range("a", 5, 6)]
    >>> count_in_ranges(launches, [Range("purestep.count_tokens", 0, 3), Range("purestep.x", 8, 9)])
    {'purestep.count': 1, 'purestep.x': 0}
    """
    counts = dict.fromkeys(sorted({event.name for event in ranges}), 0)
    for event in ranges:
        for launch in launches:
            if event.begin <= launch.begin < event.end:
                counts[event.name] += 1
    return counts


def sum_kernels(events: Iterable[Any]) -> dict[str, Any]:
    """Returns what the device has done: kernels, copies, and the kernels that took longest."""
    milliseconds: Counter[str] = Counter()
    copies: Counter[str] = Counter()
    kernels = 0
    for event in events:
        if event.name.startswith(("Memcpy", "Memset")):
            copies[event.name] += 1
        else:
            kernels += 1
            milliseconds[event.name[:60]] += event.time_range.elapsed_us() / 1000
    return {
        "kernels": kernels,
        "device_ms": round(sum(milliseconds.values()), 3),
        "copies": dict(copies),
        "longest": {
            name: round(ms, 3) for name, ms in milliseconds.most_common(LONGEST)
        },
    }
