"""GPT-2's smallest size: time, tokens in a second, share of the card's peak, and memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import purestep as ps
from benchmarks.gpu import measure
from benchmarks.gpu.entries import Run
from benchmarks.gpu.graphs import capture_update, choose_compiler, compile_function
from benchmarks.gpu.models import (
    Batch,
    build_gpt,
    find_peak,
    flops_per_token,
    gpt_sizes,
    make_text,
)
from purestep import optim, tree

Group = Sequence[Batch]
Update = Callable[[Group], object]
"""One update on a group of microbatches."""

RATE, DECAY = 1e-4, 1e-2
CLIPPED = optim.chain(
    optim.clip_by_global_norm(1.0), optim.adamw(RATE, weight_decay=DECAY)
)
WHOLE = "ps.compile(step), donate"
STACKED = "ps.compile(step), donate, stacked"
CPP_WRAPPER = "purestep, donate, compile=True, cpp_wrapper"
SECONDS_FOR_A_WAY = 12
SECONDS_FOR_A_GRAPH = 70
"""To compile one: with less, a section is content with what it has compiled."""
BY_HAND = "by hand"
GRAPH = "purestep, donate, CUDA graph"
COMPILED_GRAPH = "purestep, donate, compile=True, CUDA graph"
SIDE_LINES = ("bf16", "normalize")
"""What the names of ways hold that are measured with the fewest and the most microbatches alone."""


def run_gpt(run: Run) -> None:
    """Measures what needs no compiler."""
    bench = Bench(run)
    ways: dict[str, Callable[[], Update]] = {
        BY_HAND: partial(bench.make_loop, compiled=False, half=False),
        "purestep, donate": partial(bench.make_step, donate=True),
        "purestep": bench.make_step,
        "bf16 params: by hand": partial(bench.make_loop, compiled=False, half=True),
        "bf16 params: purestep, donate": partial(
            bench.make_step, half=True, donate=True
        ),
        'purestep, donate, normalize="grads"': partial(
            bench.make_step, donate=True, normalize="grads"
        ),
    }
    if run.is_cuda:
        # The last one, since a capture that fails may break the context.
        ways[GRAPH] = bench.make_graph
    for name, make in ways.items():
        if run.has_time(SECONDS_FOR_A_WAY, "ways", name):
            with run.attempt("ways", name):
                bench.measure(name, bench.prepare(name, make))
        measure.free_memory(run)
    if run.has_time(SECONDS_FOR_A_WAY, "optimizer"):
        with run.attempt("optimizer"):
            bench.measure_optimizer()


def run_gpt_by_hand_compiled(run: Run) -> None:
    """Compiles the loop by hand, and measures it in its turn."""
    bench = Bench(run)
    make = partial(bench.make_loop, compiled=True, half=False)
    measure_compiled(run, bench, "by hand, compiled", make)


def run_gpt_compiled(run: Run) -> None:
    """Compiles a step, and measures it in its turn."""
    bench = Bench(run)
    params, loss_fn = bench.make_loss(half=False)
    step = ps.make_update_step(
        loss_fn, CLIPPED, donate=True, compile=choose_compiler(run)
    )
    make = partial(make_update, step, params)
    del params  # The update donates them.
    measure_compiled(run, bench, "purestep, donate, compile=True", make)
    del make
    if run.is_cuda and run.has_time(SECONDS_FOR_A_WAY, "ways", COMPILED_GRAPH):
        with run.attempt("ways", COMPILED_GRAPH):
            params, _ = bench.make_loss(half=False)
            capture = partial(bench.capture, COMPILED_GRAPH, step, params)
            bench.measure(COMPILED_GRAPH, bench.prepare(COMPILED_GRAPH, capture))


def run_gpt_cpp_wrapper(run: Run) -> None:
    """Compiles what calls the kernels as well, and measures it in its turn."""
    bench = Bench(run)
    compiler = (
        choose_compiler(run)
        if run.tiny
        else partial(ps.compile, options={"cpp_wrapper": True})
    )
    make = partial(bench.make_step, donate=True, compile=compiler)
    measure_compiled(run, bench, CPP_WRAPPER, make)


def run_gpt_whole(run: Run) -> None:
    """Compiles a step with its one microbatch to one graph, and measures it in its turn."""
    measure_whole(run, WHOLE)


def run_gpt_stacked(run: Run) -> None:
    """Compiles a step to one graph of any number of microbatches, and measures it in its turn."""
    measure_whole(run, STACKED)


def measure_whole(run: Run, name: str) -> None:
    """Compiles a step to one graph, and measures it in its turn."""
    bench = Bench(run)
    params, loss_fn = bench.make_loss(half=False)
    settings: dict[str, Any] = {"fullgraph": True}
    if run.tiny:
        settings["backend"] = "aot_eager"
    step = ps.make_update_step(loss_fn, CLIPPED, donate=True)
    make = partial(make_update, ps.compile(step, **settings), params)
    del params  # The update donates them.
    measure_compiled(run, bench, name, make)


def make_update(step: Any, params: Any) -> Update:
    """Returns updates by a step, from these params on."""
    state = [params, CLIPPED.init(params)]

    def update(group: Group) -> None:
        state[:] = step(state[0], state[1], group)[:2]

    return update


def measure_compiled(
    run: Run, bench: Bench, name: str, make: Callable[[], Update]
) -> None:
    """Compiles beside other sections, and measures alone."""
    with run.attempt("ways", name):
        # Groups of other lengths make no other graph of a stacked one.
        spare = SECONDS_FOR_A_WAY if name == STACKED else SECONDS_FOR_A_GRAPH
        update = bench.prepare(name, make, spare=spare)
        measure.free_memory(run)
        run.wait_for_turn()
        bench.measure(name, update)
        del update
        measure.free_memory(run)


class Bench:
    """The network, its data, and the ways to train it.

    All ways count tokens over the whole group, clip the gradients' norm and take AdamW. They
    compute in bfloat16, by autocast unless the params are in bfloat16.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.sizes = gpt_sizes(run)
        numbers = (1, 2) if run.tiny else (1, 4, 16)
        self.groups: list[Group] = [make_text(run, number) for number in numbers]
        self.prepared: dict[str, list[Group]] = {}
        """For each way, the groups on which it has run."""
        self.num_parameters = sum(leaf.numel() for leaf in build_gpt(run).parameters())
        self.peak = find_peak(torch.cuda.get_device_name(0)) if run.is_cuda else None
        run.add(parameters=self.num_parameters, **self.sizes._asdict())

    def cast(self, half: bool) -> AbstractContextManager[Any]:
        """Returns autocast; nothing where params are in bfloat16 themselves."""
        if half:
            return nullcontext()
        return torch.autocast(self.run.device, dtype=torch.bfloat16)

    def make_loop(self, *, compiled: bool, half: bool) -> Update:
        """Returns the loop that a careful person writes."""
        model = build_gpt(self.run, torch.bfloat16 if half else torch.float32)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=RATE, weight_decay=DECAY, fused=self.run.is_cuda
        )

        def sum_losses(tokens: Tensor, labels: Tensor) -> Tensor:
            logits = model(tokens).float().flatten(0, 1)
            return functional.cross_entropy(logits, labels.flatten(), reduction="sum")

        loss_fn = compile_function(self.run, sum_losses) if compiled else sum_losses

        def update(group: Group) -> None:
            number = torch.stack(
                [(batch["labels"] != -100).sum() for batch in group]
            ).sum()
            for batch in group:
                with self.cast(half):
                    loss = loss_fn(batch["tokens"], batch["labels"])
                (loss / number).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return update

    def make_loss(self, half: bool) -> tuple[Any, Any]:
        """Returns params and a loss of them."""
        params, apply = ps.from_module(
            build_gpt(self.run, torch.bfloat16 if half else torch.float32)
        )

        def loss_fn(params: Any, batch: Batch) -> Tensor:
            with self.cast(half):
                return ps.losses.cross_entropy(
                    apply(params, batch["tokens"]), batch["labels"]
                )

        return params, loss_fn

    def make_step(self, *, half: bool = False, **settings: Any) -> Update:
        """Returns a step of purestep's."""
        params, loss_fn = self.make_loss(half)
        return make_update(ps.make_update_step(loss_fn, CLIPPED, **settings), params)

    def make_graph(self) -> Update:
        """Returns a step that is one CUDA graph for each number of microbatches."""
        params, loss_fn = self.make_loss(half=False)
        step = ps.make_update_step(loss_fn, CLIPPED, donate=True)
        return self.capture(GRAPH, step, params)

    def capture(self, name: str, step: Any, params: Any) -> Update:
        """Returns a donated step that is one CUDA graph for each number of microbatches."""
        replays: dict[int, Callable[[], None]] = {}

        def update(group: Group) -> None:
            if len(group) not in replays:
                # Each graph has params of its own, so that none overwrites another's.
                captured = capture_update(step, params, CLIPPED, group)
                self.run.check("ways", name, state_stays=captured.state_stays)
                replays[len(group)] = captured.replay
            replays[len(group)]()

        return update

    def prepare(
        self, name: str, make: Callable[[], Update], *, spare: float = 4.0
    ) -> Update:
        """Makes an update, and takes a few, after which everything is compiled.

        The first group always runs; another one while there are ``spare`` seconds.
        """
        begin = time.perf_counter()
        update = make()
        self.prepared[name] = []
        for group in self.choose_groups(name):
            path = ("ways", name, f"K={len(group)}")
            if self.prepared[name] and not self.run.has_time(spare, *path):
                break
            for _ in range(1 if len(group) > 4 else 2):
                update(group)
            self.prepared[name].append(group)
        measure.synchronise(self.run)
        self.run.add("ways", name, first_seconds=round(time.perf_counter() - begin, 2))
        return update

    def measure(self, name: str, update: Update) -> None:
        """Adds times, memory, kernels and waits of an update."""
        for group in self.prepared[name]:
            number = len(group)
            path = ("ways", name, f"K={number}")
            if not self.run.has_time(4, *path):
                continue
            call = partial(update, group)
            entries = measure.time_calls(self.run, call, seconds=0.5, blocks=3)
            tokens = number * self.sizes.rows * self.sizes.context
            entries |= self.rate_tokens(tokens / entries["ms"] * 1000)
            if name not in (GRAPH, COMPILED_GRAPH):
                # The allocator does not count what a graph uses.
                entries |= measure.measure_peak(self.run, call)
            self.run.add(*path, **entries)
        group = self.prepared[name][0]
        if self.run.has_time(4, "ways", name, "profile"):
            profile = measure.count_launches(self.run, partial(update, group))
            self.run.add("ways", name, "profile", **profile)
            waits = measure.find_waits(self.run, partial(update, group))
            self.run.add("ways", name, "profile", waits=waits)

    def choose_groups(self, name: str) -> list[Group]:
        """Returns the groups on which a way is measured."""
        if any(word in name for word in SIDE_LINES):
            return [self.groups[0], self.groups[-1]]
        if name == WHOLE:
            return self.groups[:1]
        if name == STACKED:
            return [ps.stack(group) for group in self.groups[1:]]
        return self.groups

    def rate_tokens(self, tokens_per_second: float) -> dict[str, Any]:
        """Returns tokens in a second, and the share of the card's peak that this takes."""
        rates: dict[str, Any] = {"tokens_per_s": round(tokens_per_second)}
        if self.peak:
            flops = tokens_per_second * flops_per_token(self.sizes, self.num_parameters)
            rates["mfu"] = round(flops / self.peak, 4)
        return rates

    def measure_optimizer(self) -> None:
        """Times what follows the backward passes: norm, clipping and AdamW."""
        for name, dtype in {
            "float32": torch.float32,
            "bfloat16": torch.bfloat16,
        }.items():
            model = build_gpt(self.run, dtype)
            params = {key: leaf.detach() for key, leaf in model.named_parameters()}
            state = CLIPPED.init(params)
            # So small that they are never clipped, and may be used again.
            grads = tree.map(
                partial(torch.full_like, fill_value=1e-6, dtype=torch.float32), params
            )
            update_ = CLIPPED.update_
            assert update_ is not None
            call = partial(update_, grads, state, params, None)
            self.run.add(
                "optimizer", name, **measure.time_calls(self.run, call, blocks=3)
            )
            launches = measure.count_launches(self.run, call)
            self.run.add("optimizer", name, profile=launches)
