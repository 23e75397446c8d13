"""Where an update makes the host wait, in each setting, and how many kernels it launches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import purestep as ps
from benchmarks.gpu import measure, models
from benchmarks.gpu.entries import Run
from benchmarks.gpu.graphs import capture_update, choose_compiler
from benchmarks.gpu.models import Batch, count_rows
from purestep import optim, tree

WIDTHS = [64, 128, 128, 8]
ROWS = [10, 22]
CLIPPED = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
RATE = optim.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)

OPTIMIZERS: dict[str, Any] = {
    "sgd": optim.sgd(0.1),
    "momentum": optim.sgd(0.1, 0.9, weight_decay=0.1),
    "adamw": optim.adamw(1e-3),
    "scheduled adamw": optim.adamw(RATE),
    "clipped adamw": CLIPPED,
    "lion": optim.lion(1e-3),
}
PLAIN = {"normalize": "loss", "donate": True, "on_nonfinite": "propagate"}
WARM_UPS = 3
COMPILED = "compile=True"


class Case(NamedTuple):
    """A step, where it starts, and its data."""

    step: Any
    params: Any
    optimizer: Any
    group: list[Batch]
    expected_waits: int = 0
    is_profiled: bool = True


def run_waits(run: Run) -> None:
    """Counts waits and kernels in every setting; what is compiled comes last."""
    if run.device == "lazy":
        # Lazy tensors exist from the first call on.
        from support.devices import get_device

        get_device()
    problem = Problem(run)
    for name, make in {**problem.settings(), **problem.special_cases()}.items():
        with run.attempt("steps", name):
            look_at(run, name, make())
    with run.attempt("by hand"):
        look_at_loop(run, problem)
    with run.attempt("transition"):
        look_at_transition(run, problem)
    if run.device == "lazy":
        return
    with run.attempt("prefetched"):
        look_at_prefetched(run, problem)
    for name, make in problem.compiled_cases().items():
        if run.has_time(15, "steps", name):
            with run.attempt("steps", name):
                look_at(run, name, make())
    if run.is_cuda:
        with run.attempt("graph"):
            look_at_graph(run, problem)


class Problem:
    """A small network, and the steps that train it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.device = run.device
        self.group = models.make_regression(ROWS, WIDTHS, run.device)
        model = models.build_mlp(WIDTHS, run.device)
        self.params: Any
        self.apply: Any
        if run.device == "lazy":
            # The first call of an ``apply`` asks for addresses, which lazy tensors have not.
            self.params = {
                name: leaf.detach() for name, leaf in model.named_parameters()
            }
            self.apply = partial(torch.func.functional_call, model)
        else:
            self.params, self.apply = ps.from_module(model)

    def loss(self, params: Any, batch: Batch) -> Any:
        """Returns the loss of each row."""
        return ps.losses.mse(self.apply(params, batch["x"]), batch["y"])

    def autocast_loss(self, params: Any, batch: Batch) -> Any:
        """Returns the same, computed in bfloat16."""
        with torch.autocast(self.device, dtype=torch.bfloat16):
            return self.loss(params, batch)

    def make_case(self, optimizer: Any, *, half: bool = False, **settings: Any) -> Case:
        """Returns a step of this network; with ``half``, of params and data in bfloat16."""
        params, group = self.params, self.group
        if half:
            params = to_half(params)
            group = [to_half(batch) for batch in group]
        settings.setdefault("loss_fn", self.loss)
        loss_fn = settings.pop("loss_fn")
        step = ps.make_update_step(loss_fn, optimizer, weight_fn=count_rows, **settings)
        return Case(step, params, optimizer, group)

    def settings(self) -> dict[str, Callable[[], Case]]:
        """Returns all combinations of settings with all optimizers."""
        cases: dict[str, Callable[[], Case]] = {}
        grid = itertools.product(
            OPTIMIZERS,
            ["loss", "grads"],
            [False, True],
            ["propagate", "skip"],
            [False, True],
        )
        for name, normalize, donate, on_nonfinite, half in grid:
            dtype = "bfloat16" if half else "float32"
            title = f"{name}, {normalize}, donate={donate}, {on_nonfinite}, {dtype}"
            settings = {
                "normalize": normalize,
                "donate": donate,
                "on_nonfinite": on_nonfinite,
            }
            is_plain = settings == PLAIN and not half
            if self.run.tiny and name != "clipped adamw" and not is_plain:
                continue
            settings["half"] = half
            cases[title] = partial(self.make_combination, name, settings)
        return cases

    def make_combination(self, name: str, settings: dict[str, Any]) -> Case:
        """Returns one of the combinations. Each optimizer is profiled in its plainest setting."""
        is_plain = PLAIN.items() <= settings.items()
        is_profiled = is_plain or (name == "clipped adamw" and not self.run.tiny)
        case = self.make_case(OPTIMIZERS[name], **settings)
        return case._replace(is_profiled=is_profiled)

    def special_cases(self) -> dict[str, Callable[[], Case]]:
        """Returns what is no combination."""
        cases: dict[str, Callable[[], Case]] = {
            "masked adamw": lambda: self.make_case(
                optim.adamw(1e-3, mask=find_matrices)
            ),
            "from_torch": self.make_torch_case,
        }
        if self.device != "lazy":
            cases |= {
                "autocast": lambda: self.make_case(CLIPPED, loss_fn=self.autocast_loss),
                "remat": lambda: self.make_case(CLIPPED, loss_fn=ps.remat(self.loss)),
                "keyed dropout": self.make_keyed_case,
                "linear cross entropy": self.make_vocabulary_case,
            }
        return cases

    def make_torch_case(self) -> Case:
        """Returns a step of an algorithm of torch, for which the host waits once."""
        optimizer = optim.from_torch(torch.optim.RMSprop, lr=1e-3)
        return self.make_case(optimizer)._replace(expected_waits=1)

    def make_keyed_case(self) -> Case:
        """Returns a step of a module with dropout."""
        layers = nn.Linear(WIDTHS[0], 64), nn.Dropout(0.1), nn.Linear(64, WIDTHS[-1])
        params, apply = ps.from_module(nn.Sequential(*layers).to(self.device))
        keys = ps.random.fold_in(ps.random.key(1), torch.arange(sum(ROWS))).to(
            self.device
        )
        parts = keys.split(ROWS)
        group = [
            {**batch, "key": key} for batch, key in zip(self.group, parts, strict=True)
        ]

        def loss(params: Any, batch: Batch) -> Any:
            return ps.losses.mse(
                apply(params, batch["x"], key=batch["key"]), batch["y"]
            )

        step = ps.make_update_step(loss, CLIPPED, weight_fn=count_rows)
        return Case(step, params, CLIPPED, group)

    def make_vocabulary_case(self) -> Case:
        """Returns a step of a loss whose logits are never complete."""
        params = {
            "hidden": torch.eye(32, device=self.device),
            "head": torch.randn(5000, 32, device=self.device),
        }
        labels = torch.randint(5000, (64,), device=self.device)
        batch = {"x": torch.randn(64, 32, device=self.device), "labels": labels}

        def loss(params: Any, batch: Batch) -> Any:
            hidden = batch["x"] @ params["hidden"]
            return ps.losses.linear_cross_entropy(
                hidden, params["head"], batch["labels"]
            )

        return Case(ps.make_update_step(loss, CLIPPED), params, CLIPPED, [batch])

    def compiled_cases(self) -> dict[str, Callable[[], Case]]:
        """Returns what torch.compile takes part in."""
        compiler = choose_compiler(self.run)
        settings: dict[str, dict[str, Any]] = {
            f"{COMPILED}, donate=True": {"donate": True},
            f"{COMPILED}, grads, skip, bfloat16": {
                "normalize": "grads",
                "on_nonfinite": "skip",
                "half": True,
            },
        }
        return {
            name: partial(self.make_case, CLIPPED, compile=compiler, **extra)
            for name, extra in settings.items()
        }


def find_matrices(params: Any) -> Any:
    """Returns a mask of the matrices."""
    return tree.map(lambda leaf: leaf.ndim > 1, params)


def to_half(values: Any) -> Any:
    """Returns tensors in bfloat16."""
    return tree.map(lambda leaf: leaf.to(torch.bfloat16), values)


def look_at(run: Run, name: str, case: Case) -> None:
    """Takes updates of a case, and adds the waits and the launches of the last ones."""
    state = [tree.map(torch.clone, case.params)]
    state.append(case.optimizer.init(state[0]))

    def update() -> None:
        state[:] = case.step(*state, case.group)[:2]

    for _ in range(WARM_UPS):
        update()
    waits = measure.find_waits(run, update)
    run.add("steps", name, waits=waits)
    if run.device != "cpu":
        run.check("steps", name, waits_as_expected=len(waits) == case.expected_waits)
    if case.is_profiled and run.device != "lazy":
        run.add("steps", name, launches=measure.count_launches(run, update))


def look_at_loop(run: Run, problem: Problem) -> None:
    """Does the same for the loop that people write."""
    model = models.build_mlp(WIDTHS, run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=run.is_cuda)

    def update() -> None:
        number = torch.stack([count_rows(batch).sum() for batch in problem.group]).sum()
        for batch in problem.group:
            losses = functional.mse_loss(
                model(batch["x"]), batch["y"], reduction="none"
            )
            (losses.mean(-1).sum() / number).backward()
        if run.device != "lazy":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UPS):
        update()
    run.add("by hand", waits=measure.find_waits(run, update))
    if run.device != "lazy":
        run.add("by hand", launches=measure.count_launches(run, update))


def look_at_transition(run: Run, problem: Problem) -> None:
    """Counts what follows the backward passes: the update of params and state alone."""
    if run.device == "lazy":
        return
    for half in (False, True):
        params = (
            to_half(problem.params) if half else tree.map(torch.clone, problem.params)
        )
        state = CLIPPED.init(params)
        update_ = CLIPPED.update_
        assert update_ is not None
        # The bool scalar that a step has, which is never read.
        applied = torch.ones((), dtype=torch.bool, device=run.device)
        make_grads = partial(
            tree.map, partial(torch.ones_like, dtype=torch.float32), params
        )
        update_(make_grads(), state, params, applied)
        update = partial(update_, make_grads(), state, params, applied)
        name = "bfloat16" if half else "float32"
        launches = measure.count_launches(run, update)
        run.add("transition", name, leaves=len(tree.flatten(params)[0]), **launches)


def look_at_prefetched(run: Run, problem: Problem) -> None:
    """Counts waits of steps whose data arrives from the host."""
    on_host = [
        {key: leaf.cpu() for key, leaf in batch.items()} for batch in problem.group
    ]
    groups = (on_host for _ in range(6))
    case = problem.make_case(CLIPPED, donate=True)
    state = [tree.map(torch.clone, case.params)]
    state.append(case.optimizer.init(state[0]))
    waits: list[str] = []
    for position, group in enumerate(
        ps.prefetch(groups, run.device, weight_fn=count_rows)
    ):

        def update(group: Any = group) -> None:
            state[:] = case.step(*state, group)[:2]

        if position < WARM_UPS:
            update()
        else:
            waits += measure.find_waits(run, update)
    run.add("prefetched", waits=waits)
    run.check("prefetched", no_waits=not waits)


def look_at_graph(run: Run, problem: Problem) -> None:
    """Captures a donated step as a CUDA graph, and compares it with eager steps, on two groups."""
    case = problem.make_case(CLIPPED, donate=True)
    captured = capture_update(case.step, case.params, case.optimizer, case.group)
    params = tree.map(torch.clone, case.params)
    state: list[Any] = [params, case.optimizer.init(params)]
    for _ in range(captured.updates + 4):
        state[:] = case.step(*state, case.group)[:2]
    for _ in range(4):
        captured.replay()
    other_group = [tree.map(torch.neg, batch) for batch in case.group]
    state[:] = case.step(*state, other_group)[:2]
    tree.map(Tensor.copy_, case.group, other_group)
    captured.replay()
    measure.synchronise(run)
    pairs = zip(tree.flatten(captured.state)[0], tree.flatten(state)[0], strict=True)
    distance = max(float((a.double() - b.double()).abs().max()) for a, b in pairs)
    run.add("graph", distance_to_eager_steps=distance)
    run.check(
        "graph", state_stays=captured.state_stays, near_to_eager_steps=distance < 1e-5
    )
