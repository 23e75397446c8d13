"""Bugs that happened, put into purestep's own source one at a time: each must fail a theorem.

A mutant replaces a few words of the package by the wrong ones and loads the result beside the real one. A
replacement that no longer fits the source is an error, so that no mutant dies by accident of its own.

    python -m proofs.mutants        writes the table of who rejects whom into proofs/README.md
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import purestep
from proofs.theorem import System, Theorem

README = Path(__file__).with_name("README.md")
DRAWS = 3
"""In each of so many draws of cases, a theorem of the table rejects the mutant."""
MODULES = [
    "purestep.pieces",
    "purestep.tree.structure",
    "purestep.tree.observers",
    "purestep.tree.memory",
    "purestep.tree.alike",
    "purestep.tree.reductions",
    "purestep.tree",
    "purestep.form",
    "purestep.random",
    "purestep.keyed",
    "purestep.modules",
    "purestep.axis.queue",
    "purestep.axis.buckets",
    "purestep.axis.packets",
    "purestep.axis.whole",
    "purestep.loss_gathers",
    "purestep.shard",
    "purestep.tokens",
    "purestep.batching.cut",
    "purestep.batching.group",
    "purestep.batching.pack",
    "purestep.batching.prefetch",
    "purestep.objective",
    "purestep.backward",
    "purestep.reverse_mode",
    "purestep.passes",
    "purestep.gathering",
    "purestep.gathering_of_ranks",
    "purestep.grads",
    "purestep.conversation",
    "purestep.donation",
    "purestep.optim.schedules",
    "purestep.optim.base",
    "purestep.optim.leafwise",
    "purestep.optim.partition",
    "purestep.optim.transforms",
    "purestep.optim.recipes",
    "purestep.optim.adam",
    "purestep.optim.master",
    "purestep.optim.ema",
    "purestep.optim.torch_optim",
    "purestep.optim",
    "purestep.optim.transition",
    "purestep.step",
    "purestep.evaluation",
    "proofs.parallel",
]
OWN_TYPES = {
    name
    for name in MODULES
    if any(
        part in name
        for part in (
            "batching",
            "backward",
            "queue",
            "buckets",
            "packets",
            "loss_gathers",
            "conversation",
            "gathering",
            "keyed",
            "modules",
        )
    )
}
"""Modules whose classes are part of what is mutated."""
ATTRIBUTES = ["purestep.pieces", "purestep.tree"]
"""Modules that others import as names of the package."""
THEOREM_FILES = [
    "test_t01_cut",
    "test_t02_ranks",
    "test_t03_order",
    "test_t04_padding",
    "test_t05_weights",
    "test_t06_purity",
    "test_t07_identity",
    "test_t12_shard",
    "test_t13_donation",
    "test_t14_repartition",
    "test_t15_random",
    "test_t16_resume",
    "test_t17_denominators",
]


class Patch(NamedTuple):
    """In this module, these words for those."""

    module: str
    old: str
    new: str


class Mutant(NamedTuple):
    """A bug by its number in the list of bugs that happened (a letter where there are several ways)."""

    number: str
    bug: str
    patches: list[Patch]


def grads(old: str, new: str) -> Patch:
    """A patch of the accumulation."""
    return Patch("purestep.grads", old, new)


def passes(old: str, new: str) -> Patch:
    """A patch of a microbatch's pass."""
    return Patch("purestep.passes", old, new)


def drawing(old: str, new: str) -> Patch:
    """A patch of what is drawn."""
    return Patch("purestep.random", old, new)


def backward(old: str, new: str) -> Patch:
    """A patch of a microbatch's backward pass."""
    return Patch("purestep.backward", old, new)


def objective(old: str, new: str) -> Patch:
    """A patch of a microbatch's part of the objective."""
    return Patch("purestep.objective", old, new)


def tokens(old: str, new: str) -> Patch:
    """A patch of the count."""
    return Patch("purestep.tokens", old, new)


def donation(old: str, new: str) -> Patch:
    """A patch of what is looked at before buffers are given away."""
    return Patch("purestep.donation", old, new)


def transition(old: str, new: str) -> Patch:
    """A patch of the optimizer's transition."""
    return Patch("purestep.optim.transition", old, new)


def optim(module: str, old: str, new: str) -> Patch:
    """A patch of an optimizer."""
    return Patch(f"purestep.optim.{module}", old, new)


def step(old: str, new: str) -> Patch:
    """A patch of the flow."""
    return Patch("purestep.step", old, new)


def in_parallel(old: str, new: str) -> Patch:
    """A patch of the programs on a mesh of two dimensions."""
    return Patch("proofs.parallel", old, new)


def shards(old: str, new: str) -> Patch:
    """A patch of the way from whole tensors to pieces and back."""
    return Patch("purestep.axis.whole", old, new)


def gathering(old: str, new: str) -> Patch:
    """A patch of what a step does with pieces over its own axis."""
    return Patch("purestep.gathering", old, new)


def of_ranks(old: str, new: str) -> Patch:
    """A patch of the same, where ranks run programs of their own."""
    return Patch("purestep.gathering_of_ranks", old, new)


def trees(old: str, new: str) -> Patch:
    """A patch of what is computed of a whole tree."""
    return Patch("purestep.tree.reductions", old, new)


def forms(old: str, new: str) -> Patch:
    """A patch of what a loss sees of a tree."""
    return Patch("purestep.form", old, new)


def buckets(old: str, new: str) -> Patch:
    """A patch of the buckets in which gradients travel."""
    return Patch("purestep.axis.buckets", old, new)


def packets(old: str, new: str) -> Patch:
    """A patch of the packets in which pieces travel."""
    return Patch("purestep.axis.packets", old, new)


def evaluation(old: str, new: str) -> Patch:
    """A patch of the step without gradients."""
    return Patch("purestep.evaluation", old, new)


def batching(module: str, old: str, new: str) -> Patch:
    """A patch of the way from examples to groups."""
    return Patch(f"purestep.batching.{module}", old, new)


SHARES = "shares = weights if total is None else _exact(weights) / total.num_tokens"
SHIFTED = '(output + params["shifts"].sum() - batch["y"]).square()'
LOCAL_MEAN = SHARES.replace("total.num_tokens", "divisor(weights.sum())")
SHARE = "share = 1 / divisor(total.num_microbatches).to(losses)"
COUNTED = "tokens_of(each) for each in weights"
SEEN = "            with gathering as (seen, sums):\n"
KNOWN = "group, known)"
RUN = "            here = accumulate(ranks.gathering, group, known)\n"
SUMMED = "            sums = ranks.sum(here)\n"
HELD = step(
    "if donate else group\n",
    "if donate else group\n            group = group._replace(weighed=[*group.weighed])\n"
    "            from purestep.gathering import Gathering\n",
)
ALONE = "accumulate(Gathering(flat_params, None, 'step', dtypes), group._replace(weighed=group.weighed[{0}]), known)"
OWN_LOSS = "here._replace(loss=here.loss * (known.num_tokens / {0} / axis.size).to(here.loss)) if known else here"
STEP_LOSS = "loss=over(sums.loss, grad_scale)"
STEP_TOKENS = "num_tokens=total.num_tokens,\n            num_microbatches=total.num_microbatches,\n            grad_norm"
NORM = "tree.norm_of(sums.grads, spread)"
SKIP = "applied = applied & tree.are_finite(sums.grads, spread)"
SELECTED = "tree.select(applied, moved(), old)"
PER_STEP = "    transit = transition(optimizer, donate=donate, compile=compile)\n"
FIRST = '        shared = {"params": params, "opt_state": opt_state, "settings": settings}\n'

MUTANTS = [
    Mutant(
        "1",
        "mean of microbatch means",
        [objective(SHARES, LOCAL_MEAN + " / divisor(total.num_microbatches)")],
    ),
    Mutant(
        "2",
        "count summed over microbatches, not over ranks",
        [step(KNOWN, "group, group.counted)")],
    ),
    Mutant(
        "3",
        "unshifted labels counted: one too many per row",
        [tokens(COUNTED, "tokens_of(each) + len(each) for each in weights")],
    ),
    Mutant(
        "4",
        "shifted labels counted for a model that does not shift",
        [tokens(COUNTED, "tokens_of(each[..., 1:]) for each in weights")],
    ),
    Mutant(
        "5",
        "mask applied to the numerator only",
        [tokens(COUNTED, "tokens_of(torch.ones_like(each)) for each in weights")],
    ),
    Mutant(
        "6",
        "counted on other labels than the loss uses",
        [
            tokens(
                COUNTED,
                'tokens_of(w * (m.get("y", m.get("tokens")) != 0)) for w, m in zip(weights, microbatches)',
            )
        ],
    ),
    Mutant(
        "7",
        "context-parallel ranks left out of the count",
        [in_parallel("axis=grid.both", "axis=grid.first")],
    ),
    Mutant(
        "8",
        "tensor-parallel replicas counted again",
        [in_parallel("axis=grid.first", "axis=grid.both")],
    ),
    Mutant(
        "9",
        "count carried over from the last step",
        [
            step(PER_STEP, PER_STEP + "    last = []\n"),
            step(KNOWN, "group, (last.append(known) or last[-2:])[0])"),
        ],
    ),
    Mutant(
        "10",
        "denominator clamped to at least 1",
        [
            objective(
                "positive = total if known is not None and known > 0 else torch.where(total > 0, total, 1)",
                "positive = total.clamp(min=1)",
            )
        ],
    ),
    Mutant(
        "11",
        "the world's averaging not undone: gradient over world size",
        [
            step(
                SUMMED,
                f"{SUMMED}            sums = sums._replace(grads=tree.map(lambda g: g / axis.size, sums.grads))\n",
            )
        ],
    ),
    Mutant(
        "12",
        "world size used where data-parallel size is meant",
        [
            in_parallel(
                f"return {SHIFTED}",
                f"return {SHIFTED} * grid.first.size / grid.both.size",
            )
        ],
    ),
    Mutant(
        "13",
        "an already global loss averaged over ranks again",
        [step(STEP_LOSS, STEP_LOSS + " / axis.size")],
    ),
    Mutant(
        "14a",
        "divided by the number of microbatches as well",
        [objective(SHARES, SHARES + " / divisor(total.num_microbatches)")],
    ),
    Mutant(
        "14b",
        "multiplied by the number of microbatches",
        [objective(SHARES, SHARES + " * divisor(total.num_microbatches)")],
    ),
    Mutant(
        "15",
        "a training-only factor leaks into evaluation",
        [
            evaluation(
                "loss=over(sums.loss, None if",
                "loss=over(sums.loss / max(1, group.length), None if",
            )
        ],
    ),
    Mutant(
        "16",
        "loss normalised after the backward: metric right, gradient N times too large",
        [
            objective(SHARES, "shares = weights"),
            step(STEP_LOSS, "loss=sums.loss / divisor(total.num_tokens).to(sums.loss)"),
        ],
    ),
    Mutant(
        "17",
        "gradients rescaled at every microbatch: a decaying average",
        [
            grads(
                SEEN,
                f"{SEEN}                sums.values = [value if value is None else value / 2 for value in sums.values]\n",
            )
        ],
    ),
    Mutant("18", "the normaliser is accepted and ignored", [objective(SHARES, LOCAL_MEAN)]),
    Mutant(
        "19",
        "normaliser dropped: the learning rate follows the token count",
        [objective(SHARES, "shares = weights")],
    ),
    Mutant(
        "20",
        "skip scaling when K = 1, with the local count",
        [step(KNOWN, "group, group.counted if group.length == 1 else known)")],
    ),
    Mutant(
        "21",
        "auxiliary loss scaled by local tokens",
        [objective(SHARE, "share = (tokens_of(weights) / total.num_tokens).to(losses)")],
    ),
    Mutant(
        "22",
        "global auxiliary gradient divided by world size",
        [
            step(
                KNOWN,
                "group, known and known._replace(num_microbatches=known[1] * axis.size))",
            )
        ],
    ),
    Mutant(
        "23",
        "auxiliary gradient dead, its carrier's result discarded",
        [
            objective(
                "terms.append(given.microbatch.to(losses.dtype))",
                "terms.append(given.microbatch.to(losses.dtype).detach())",
            )
        ],
    ),
    Mutant(
        "24",
        "auxiliary term not averaged over microbatches",
        [objective(SHARE, "share = losses.new_ones(())")],
    ),
    Mutant(
        "26",
        "the last microbatch's state overwrites the earlier ones",
        [
            objective(
                "so_far._replace(aux=tree.map(add, so_far.aux, own))",
                "so_far._replace(num_tokens=[*num_tokens], aux=own)",
            )
        ],
    ),
    Mutant(
        "27",
        "skip by multiplication: one NaN poisons everything after",
        [
            optim(
                "base", "grads = held_back(grads, applied)\n        moved", "pass\n        moved"
            ),
            optim(
                "base",
                SELECTED,
                "tree.map(lambda a, b: applied * a + ~applied * b, moved(), old)",
            ),
        ],
    ),
    Mutant(
        "28a",
        "skip that still moves moments and the step counter",
        [
            optim(
                "base",
                SELECTED,
                "(lambda new: (tree.select(applied, new[0], params), new[1]))(moved())",
            )
        ],
    ),
    Mutant(
        "28b",
        "skip that still moves the step counter, on the host",
        [
            transition(
                "return params.tree(), state.tree()\n",
                "return params.tree(), tree.map(lambda s: s if s.ndim else s + 1, state.tree())\n",
            )
        ],
    ),
    Mutant(
        "29",
        "accumulation in bfloat16",
        [grads("accum_dtype or accumulation_dtype(dtype)", "accum_dtype or dtype")],
    ),
    Mutant(
        "30",
        "zeroing inside the loop: only the last microbatch survives",
        [
            grads(SEEN, f"{SEEN}                sums.values[:] = [None] * len(seen.leaves)\n"),
        ],
    ),
    Mutant(
        "31",
        "copying instead of adding: only the first survives",
        [
            backward("else so_far + grad", "else so_far"),
            grads(
                "in_place)(task, sums, ",
                "in_place)(task, sums if position == 1 else type(sums)(seen.leaves, sums.dtypes), ",
            ),
        ],
    ),
    Mutant(
        "32a",
        "the last microbatch added after the reduction",
        [
            HELD,
            step(
                SUMMED,
                f"{SUMMED}            early = {ALONE.format(':-1')}.grads\n"
                f"            late = {ALONE.format('-1:')}.grads\n"
                "            early = tree.map(lambda leaf: axis.apply('psum', leaf), early)\n"
                "            sums = sums._replace(grads=tree.map(torch.add, early, late))\n",
            ),
        ],
    ),
    Mutant(
        "32b",
        "the last microbatch added after its bucket has left",
        [grads("position == group.length", "position >= group.length - 1")],
    ),
    Mutant(
        "33a",
        "the first step taken after a single microbatch",
        [
            step(PER_STEP, PER_STEP + "    taken = []\n"),
            step(
                FIRST,
                FIRST
                + "        microbatches = microbatches if taken else microbatches[:1]\n"
                + "        taken.append(True)\n",
            ),
        ],
    ),
    Mutant(
        "33b",
        "the first group handed over after a single microbatch",
        [
            batching(
                "group",
                "while len(self._taken) < self._k:",
                "while len(self._taken) < (self._k if self.position else 1):",
            )
        ],
    ),
    Mutant(
        "34a",
        "a short tail divided by the full K",
        [objective(SHARES, LOCAL_MEAN + " / 4")],
    ),
    Mutant(
        "34b",
        "a short tail filled up to the full K",
        [
            batching(
                "group",
                "self.position += len(taken)",
                "self.position += len(taken)\n        taken = (taken * self._k)[: self._k]",
            )
        ],
    ),
    Mutant(
        "35a",
        "a tail that leaks into the next group",
        [
            step(PER_STEP, PER_STEP + "    left = []\n"),
            step(
                FIRST,
                FIRST
                + "        microbatches = [*left, *microbatches]\n"
                + "        left[:] = microbatches[-1:]\n",
            ),
        ],
    ),
    Mutant(
        "35b",
        "a tail that leaks into the next group, in the stream",
        [
            batching(
                "group",
                "taken, self._taken = self._taken, []",
                "taken, self._taken = self._taken, self._taken[-1:] if self._k > 1 else []",
            )
        ],
    ),
    Mutant(
        "35c",
        "a tail that is lost",
        [
            batching(
                "group",
                'if not taken or (len(taken) < self._k and self._last == "drop"):',
                "if len(taken) < self._k:",
            )
        ],
    ),
    Mutant(
        "36a",
        "non-finite check after the optimizer has moved",
        [
            step(SKIP, "pass"),
            step(
                "        metrics = StepMetrics(",
                '        if on_nonfinite == "skip":\n'
                "            applied = applied & tree.all_finite(new_params)\n"
                "            new_params = tree.select(applied, new_params, params)\n"
                "        metrics = StepMetrics(",
            ),
        ],
    ),
    Mutant(
        "36b",
        "non-finite check on one rank alone",
        [
            HELD,
            step(SKIP, f"applied = applied & tree.are_finite({ALONE.format(':')}.grads, spread)"),
        ],
    ),
    Mutant(
        "37",
        "reduction at every microbatch: right values, K times the traffic",
        [
            HELD,
            step(
                RUN + SUMMED,
                "            sums = None\n"
                "            for place in range(max(1, group.length)):\n"
                f"                one = {ALONE.format('place : place + 1')}\n"
                "                one = tree.map(lambda leaf: axis.apply('psum', leaf), one)\n"
                "                sums = one if sums is None else tree.map(torch.add, sums, one)\n",
            ),
        ],
    ),
    Mutant(
        "38",
        "different numbers of microbatches per rank: a hang",
        [
            step(
                RUN,
                f"            for _ in microbatches:\n                axis.apply('psum', torch.zeros(()))\n{RUN}",
            )
        ],
    ),
    Mutant(
        "39a",
        "tokens off by K",
        [step(STEP_TOKENS, STEP_TOKENS.replace(",", " * len(microbatches),", 1))],
    ),
    Mutant(
        "39b",
        "tokens counting padding",
        [
            step(
                STEP_TOKENS,
                STEP_TOKENS.replace(
                    "total.num_tokens",
                    "0 * total.num_tokens + sum(\n"
                    '                (weight_fn or (lambda m: m["w"]))(m).numel() for m in microbatches\n'
                    "            )",
                    1,
                ),
            )
        ],
    ),
    Mutant(
        "39c",
        "tokens counting padding, on the host",
        [
            batching(
                "prefetch",
                "weigh(on_host, self.weight_fn)",
                "weigh(on_host, lambda m: torch.ones_like(self.weight_fn(m)))",
            )
        ],
    ),
    Mutant(
        "40a",
        "norm of one rank",
        [HELD, step(NORM, f"tree.norm_of({ALONE.format(':')}.grads, spread)")],
    ),
    Mutant(
        "40b",
        "norm summed over microbatches",
        [step(NORM, NORM + " * max(1, group.length)")],
    ),
    Mutant(
        "41",
        "loss averaged over ranks instead of tokens",
        [
            step(
                "ranks.sum(here)",
                f"ranks.sum({OWN_LOSS.format('divisor(here.counted.num_tokens)')})",
            )
        ],
    ),
    Mutant(
        "42",
        "NaN logged by a rank without valid tokens",
        [step("ranks.sum(here)", f"ranks.sum({OWN_LOSS.format('here.counted.num_tokens')})")],
    ),
    Mutant(
        "43",
        "gradients added up in memory that two leaves share, as autograd does",
        [backward("grad.clone() if owners > 2 else grad", "grad")],
    ),
    Mutant(
        "44",
        "flat buckets laid out in each rank's own memory order",
        [
            buckets(
                "flat[start:stop].view(leaf.shape)",
                "flat[start:stop].as_strided("
                "leaf.shape, torch.empty_like(leaf).stride(), flat[start:stop].storage_offset())",
            )
        ],
    ),
    Mutant(
        "45",
        "lr / N in the default dtype",
        [
            step(
                "grad_scale = None if counted_first else divisor(total.num_tokens)",
                "grad_scale = None if counted_first else divisor(total.num_tokens).to(torch.int64)",
            ),
            optim("recipes", "rate / grad_scale.to(torch.float64)", "rate / grad_scale"),
        ],
    ),
    Mutant(
        "46",
        "weights asked for twice: what multiplies is not what was counted",
        [
            tokens(
                "weighed(microbatches, weight_fn, weights)",
                "weighed(microbatches, weight_fn)",
            )
        ],
    ),
    Mutant(
        "47",
        "a loss that reaches no parameter is applied: weight decay alone moves",
        [grads("if given and not reached and has_tokens(here.counted):", "if False:")],
    ),
    Mutant(
        "48a",
        "leaves shared by all microbatches: what a loss does to them depends on the cut",
        [
            passes(
                "        own = own_leaves(task.leaves)\n",
                '        own = vars(sums).setdefault("own", own_leaves(task.leaves))\n',
            )
        ],
    ),
    Mutant(
        "48b",
        "a hook of the loss's sees the sum, not the gradient",
        [backward("if any(map(accumulate_hooks, leaves)):", "if False:")],
    ),
    Mutant(
        "48c",
        "what a loss keeps of its leaves is the sum",
        [backward("leaf.grad = None  # A loss", "pass  # A loss")],
    ),
    Mutant(
        "49",
        "recomputed activations with other parameters than the forward pass had",
        [backward("with _Recomputation(leaves):", "if True:")],
    ),
    Mutant(
        "50",
        "what a loss closes over is given gradients",
        [backward("wanted = tuple(", "wanted = () and tuple(")],
    ),
    Mutant(
        "51a",
        "donated leaves that overlap at different offsets",
        [
            donation(
                "if any(map(gt, ends, islice(starts, 1, None))):",
                "if len({*starts}) < len(starts):",
            ),
        ],
    ),
    Mutant(
        "51b",
        "a donated leaf that shares memory with the data",
        [donation("return group._replace(check=check)", "return group")],
    ),
    Mutant(
        "53",
        "a stream resumed at what was read ahead, not at what was used",
        [
            batching(
                "prefetch",
                "    position: int | None\n",
                "    position = property(lambda self: self._lane.groups.position, lambda self, _: None)\n",
            )
        ],
    ),
    Mutant(
        "54a",
        "examples of different structures put into each other's fields",
        [batching("cut", "if own != structure:", "if False:")],
    ),
    Mutant(
        "54b",
        "the longest example's dtype for all",
        [batching("cut", "(leaf.dtype, leaf.shape[1:])", "(leaf.shape[1:],)")],
    ),
    Mutant(
        "54c",
        "examples of different shapes broadcast to each other's",
        [batching("cut", "(leaf.dtype, leaf.shape[1:])", "(leaf.dtype, leaf.ndim)")],
    ),
    Mutant(
        "54d",
        "padding with a value that its leaf cannot hold",
        [batching("pack", "if not held:", "if False:")],
    ),
    Mutant(
        "54e",
        "examples without tokens that cost a row",
        [
            batching(
                "pack",
                "sorted((i for i, length in enumerate(lengths) if length), key",
                "sorted(range(len(lengths)), key",
            ),
            batching(
                "pack", "start += budget // costs[start]", "start += budget // max(1, costs[start])"
            ),
        ],
    ),
    Mutant(
        "52",
        "a norm of one rank's pieces clips what all ranks share",
        [optim("leafwise", "grads, places.spread)", "grads, ())")],
    ),
    Mutant(
        "52b",
        "grad_norm of one rank's pieces",
        [step(NORM, "tree.norm_of(sums.grads, ())")],
    ),
    Mutant(
        "52c",
        "a skip decided by one rank's pieces",
        [step(SKIP, "applied = applied & tree.are_finite(sums.grads, ())")],
    ),
    Mutant(
        "52d",
        "what a piece is filled up with enters a norm",
        [trees("append(pieces.own(leaf, place))", "append(leaf)")],
    ),
    Mutant(
        "52e",
        "a gather without its transpose",
        [shards("all_gather(filled, ", "all_gather(filled.detach(), ")],
    ),
    Mutant(
        "52f",
        "gradients summed over ranks twice: before they are scattered, and while they are",
        [
            gathering(
                "return scattered(grad.to", 'return scattered(self._axis.apply("psum", grad).to'
            ),
            packets("together.contiguous()", "axis.size * together.contiguous()"),
        ],
    ),
    Mutant(
        "52g",
        "pieces swapped: each rank's gradient is that of the next rank's piece",
        [packets("together.contiguous()", "together.roll(1, 0).contiguous()")],
    ),
    Mutant(
        "52h",
        "what a piece is filled up with reaches the loss",
        [forms("[pieces.own(leaf, place) for", "[leaf for")],
    ),
    Mutant(
        "52i",
        "a rank with fewer microbatches does not join the gathers of the others",
        [of_ranks("while self._done < rounds:", "while False:")],
    ),
    Mutant(
        "52j",
        "pieces summed over the ranks that share them, and not over those that hold the same",
        [gathering("if inner == self._axis:", "if True:")],
    ),
    Mutant(
        "52k",
        "each microbatch's piece replaces that of the one before",
        [of_ranks("travelling, self._totals.add_", "travelling, self._totals.values.__setitem__")],
    ),
    Mutant(
        "52l",
        "what was scattered for each microbatch is scattered once more at the end",
        [
            gathering(
                "grad = here.grads[at] if self.each_microbatch else self._scattered(at, here.grads[at])",
                "grad = self._scattered(at, here.grads[at])",
            )
        ],
    ),
    Mutant(
        "54f",
        "a stream that failed ends as if the data had run out",
        [
            batching(
                "prefetch",
                "if error is not None:\n            raise error\n        return None",
                "return None",
            )
        ],
    ),
    Mutant(
        "25a",
        "the same random key for two microbatches",
        [drawing("_drawn(key, x.shape[key.ndim :], of)", "_drawn(torch.tensor(7), x.shape, of)")],
    ),
    Mutant(
        "25b",
        "one key for all examples of a microbatch, that of the first",
        [
            drawing(
                "_drawn(key, x.shape[key.ndim :], of)",
                "_drawn(key.sum() if key.numel() == 0 else key.reshape(-1)[0], x.shape, of)",
            )
        ],
    ),
    Mutant(
        "25c",
        "the flat index as counter, which the padded length changes",
        [
            drawing(
                "_drawn(key, x.shape[key.ndim :], of)",
                "_drawn(key, (x.shape[key.ndim :].numel(),), of).view(x.shape)",
            )
        ],
    ),
    Mutant(
        "25d",
        "the place in a row of several examples as counter",
        [drawing("[positions[..., None], within]", "[torch.arange(length)[:, None], within]")],
    ),
    Mutant(
        "25e",
        "a checkpoint that draws different numbers when it computes again",
        [Patch("purestep.keyed", "lambda: _Keyed(keys, count)", "lambda: _Keyed(keys, count + 1)")],
    ),
    Mutant(
        "25f",
        "a module's noise by the number of the call, and not by the example",
        [
            Patch(
                "purestep.keyed",
                "made = fold_in(keys[..., None]",
                "made = fold_in(0 * keys[..., None] + torch.arange(keys.numel()).view(keys.shape)[..., None]",
            )
        ],
    ),
]

NOT_YET: dict[str, str] = {}


def build(patches: list[Patch]) -> System:
    """purestep with these words replaced, loaded from source beside the real one."""
    mutated: dict[str, ModuleType] = {}
    with _restored(MODULES):
        for name in MODULES:
            real = importlib.import_module(name)
            source = inspect.getsource(real)
            for patch in patches:
                if patch.module == name:
                    if source.count(patch.old) != 1:
                        raise ValueError(
                            f"{name} does not have these words exactly once: {patch.old}"
                        )
                    source = source.replace(patch.old, patch.new)
            module = ModuleType(name)
            module.__file__ = f"<mutant of {name}>"
            exec(compile(source, module.__file__, "exec"), module.__dict__)
            # Types are shared: an Optimizer of the tests is an Optimizer of the mutant.
            types = {k: v for k, v in vars(real).items() if isinstance(v, type)}
            shared = {k: v for k, v in types.items() if v.__module__ not in OWN_TYPES}
            module.__dict__.update(shared)
            sys.modules[name] = mutated[name] = module
            if name in ATTRIBUTES:
                setattr(purestep, name.removeprefix("purestep."), module)
    return System(
        mutated["purestep.step"].make_update_step,
        mutated["purestep.evaluation"].make_eval_step,
        mutated["purestep.batching.group"].group,
        mutated["purestep.batching.pack"].pack,
        mutated["purestep.batching.pack"].balance,
        mutated["purestep.batching.prefetch"].prefetch,
        mutated["proofs.parallel"].context_parallel_step,
        mutated["proofs.parallel"].tensor_parallel_step,
        mutated["purestep.shard"].shard,
        mutated["purestep.shard"].unshard,
        mutated["purestep.modules"].from_module,
        mutated["purestep.random"],
        mutated["purestep.tree"],
        mutated["purestep.optim"],
    )


@contextmanager
def _restored(names: list[str]) -> Iterator[None]:
    before = {name: importlib.import_module(name) for name in names}
    try:
        yield
    finally:
        sys.modules.update(before)
        for name in ATTRIBUTES:
            setattr(purestep, name.removeprefix("purestep."), before[name])


def theorems() -> dict[str, list[Theorem]]:
    """Every theorem about a step, by its number."""
    found: dict[str, list[Theorem]] = {}
    for file in THEOREM_FILES:
        for value in vars(importlib.import_module(f"proofs.{file}")).values():
            if isinstance(value, Theorem):
                found.setdefault(value.name, []).append(value)
    return found


def killers(mutant: Mutant, examples: int = 20, draws: int = 1) -> list[str]:
    """The theorems that reject this mutant, in each of so many draws of cases."""
    system = build(mutant.patches)

    def rejected(claims: Sequence[Theorem], draw: int) -> bool:
        return any(claim.rejects(system, examples, draw=draw) for claim in claims)

    return [
        name
        for name, claims in theorems().items()
        if all(rejected(claims, draw) for draw in range(draws))
    ]


def named(mutant: Mutant) -> list[str]:
    """Those that do so whatever is drawn, by more cases where it survives a few.

    What Hypothesis draws depends on what else a process has imported, so that one draw tells little of the next.
    """
    return killers(mutant, draws=DRAWS) or killers(mutant, 300, draws=DRAWS)


def row(mutant: Mutant, killed_by: list[str]) -> str:
    """One line of the table."""
    cells = ["x" if name in killed_by else " " for name in theorems()]
    return f"| {mutant.number} | {mutant.bug} | {' | '.join(cells)} |"


def table(rows: list[str]) -> str:
    """The whole table."""
    names = list(theorems())
    head = [f"| | bug | {' | '.join(names)} |", f"|---|---|{'|'.join([':-:'] * len(names))}|"]
    return "\n".join([*head, *rows])


def main() -> None:
    """Writes the table between its marks."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as workers:
        rows = list(map(row, MUTANTS, workers.map(named, MUTANTS)))
    before, rest = README.read_text().split("<!-- mutants -->\n")[:2]
    after = rest.split("<!-- end -->\n")[1]
    README.write_text(f"{before}<!-- mutants -->\n{table(rows)}\n<!-- end -->\n{after}")


if __name__ == "__main__":
    main()
