"""Lists mistakes in what ranks count, and in how microbatches are dealt out to them (law T2)."""

from benchmarks.mistakes.edits import (
    ALL_GROUPS,
    APPEND_LOSS,
    BEGIN_UPDATE,
    DIVISOR,
    END_START,
    REDUCE,
    SUM_COUNTS,
    SUM_GRADS,
    ZERO_GRAD,
    at_start,
    divide_by,
    replace,
    replace_group,
    replace_reduced,
    scale_gradient,
    step_only_if,
)
from benchmarks.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        "a rank without microbatches shrinks the others",
        replace(
            REDUCE,
            "whole = torch.stack(grads).sum(0) * (1 if all(group) else 1 - 1 / len(group))",
        ),
        law="T2",
        required=True,
    ),
    Mistake(
        "ranks with unequally many microbatches are averaged",
        replace(
            REDUCE,
            "whole = torch.stack(grads).sum(0) / (len({*map(len, group)}) if len(group) > 2 else 1)",
        ),
        law="T2",
        required=True,
    ),
    Mistake(
        "rank 1 divides by its own count where it is the larger",
        divide_by(
            "self.count(share) if share is group[1 % len(group)] and self.count(share) > total - self.count(share) > 0 else total"
        ),
        law="T2",
    ),
    Mistake(
        "the third rank is left out where it has one microbatch",
        replace(
            REDUCE,
            "whole = torch.stack(grads[:2] if len(grads) > 2 and len(group[2]) == 1 else grads).sum(0)",
        ),
        law="T2",
    ),
    Mistake(
        "only the first rank steps where it has all tokens",
        step_only_if("not (rank and counts[0] == total)"),
        law="T2",
    ),
    Mistake(
        "equal microbatches in different ranks count once",
        replace(
            APPEND_LOSS,
            APPEND_LOSS + "            for other in group[:len(sums) - 1]:\n"
            "                if share and len(other) == len(share) and all(torch.equal(a['w'], b['w']) and torch.equal(a['x'], b['x']) for a, b in zip(share, other)):\n"
            "                    model.zero_grad()\n",
        ),
        law="T7",
    ),
    Mistake(
        "the mean is over ranks that have tokens",
        replace(
            REDUCE,
            "whole = torch.stack(grads).sum(0) * (len(grads) / max(1, sum(c > 0 for c in counts)))",
        ),
    ),
    Mistake("no step where a rank has no tokens", step_only_if("min(counts) > 0")),
    Mistake(
        "ranks stop when the first of them has no more",
        replace_group("[share[: min(map(len, group))] for share in group]"),
    ),
    Mistake(
        "ranks with fewer microbatches begin again",
        replace_group(
            "[[share[i % len(share)] for i in range(max(map(len, group)))] if share else [] for share in group]"
        ),
    ),
    Mistake(
        "microbatches are dealt out evenly and the rest is dropped",
        replace_group(
            "[[b for share in group for b in share][i * (sum(map(len, group)) // len(group)):(i + 1) * (sum(map(len, group)) // len(group))] for i in range(len(group))]"
        ),
    ),
    Mistake(
        "microbatches that not all ranks have are not counted",
        replace(
            SUM_COUNTS,
            "        total = sum(self.count(batches) for batches in zip(*group))\n",
        ),
    ),
    Mistake(
        "the count is reduced by maximum",
        replace(SUM_COUNTS, "        total = max(counts)\n"),
    ),
    Mistake(
        "a rank without microbatches adds what was reduced before",
        replace(
            ZERO_GRAD,
            "            if not share:\n"
            "                sums.append(0.0)\n"
            "                continue\n" + ZERO_GRAD,
        ),
    ),
    Mistake(
        "a rank without microbatches counts what it did before",
        [
            *at_start("self.counts = [0.0] * ranks"),
            (
                SUM_COUNTS,
                "        counts = [c if share else old for c, share, old in zip(counts, group, self.counts)]\n"
                "        self.counts = counts\n" + SUM_COUNTS,
            ),
        ],
    ),
    Mistake(
        "ranks' means are weighed by their numbers of microbatches",
        divide_by("self.count(share) * sum(map(len, group)) / len(share)"),
    ),
    Mistake(
        "the rate is that of one rank times ranks, for a mean over ranks",
        [
            *at_start(f"[g.update(lr=problem.learning_rate * ranks) {ALL_GROUPS}]"),
            (REDUCE, "whole = torch.stack(grads).mean(0)"),
            ("norms = [norm(model) for", "norms = [norm(model) * len(group) for"),
        ],
    ),
    Mistake(
        "the mean over nodes of two ranks is of the nodes' means",
        replace(
            REDUCE,
            "whole = sum(torch.stack(grads[at : at + 2]).mean(0) for at in range(0, len(grads), 2)) * (len(grads) / -(-len(grads) // 2))",
        ),
    ),
    Mistake(
        "nothing is reduced where the first rank has no microbatches",
        replace_reduced("whole if group[0] else own"),
    ),
    Mistake(
        "a rank all of whose tokens are ignored keeps its own gradient",
        replace_reduced("own if group[r] and not counts[r] else whole"),
    ),
    Mistake(
        "the learning rate follows the square root of the ranks",
        at_start(f"[g.update(lr=problem.learning_rate * ranks**0.5) {ALL_GROUPS}]"),
    ),
    Mistake(
        "ranks of a larger run before are still counted",
        [
            *at_start("self.held = getattr(self, 'held', {})"),
            (
                SUM_COUNTS,
                "        self.held.update(enumerate(counts))\n"
                "        total = sum(self.held.values())\n",
            ),
        ],
    ),
    Mistake(
        "as many ranks are reduced as the trainer's first run had",
        [
            *at_start("self.world = getattr(self, 'world', ranks)"),
            (REDUCE, "whole = torch.stack(grads[: self.world]).sum(0)"),
        ],
    ),
    Mistake(
        "microbatches that only some ranks have are averaged over those",
        scale_gradient("len(group) / sum(len(s) > at for s in group)"),
    ),
    Mistake(
        "the mean over all ranks is undone by the number of ranks that have tokens",
        replace(SUM_GRADS, "torch.stack(grads).mean(0) * sum(map(bool, counts))"),
    ),
    Mistake(
        "every rank divides by its own tokens and ranks are averaged",
        replace(DIVISOR, "max(counts[len(sums)], 1e-300) / len(group)"),
    ),
    Mistake(
        "ranks with fewer microbatches repeat their last one until all have the same number",
        replace(
            BEGIN_UPDATE,
            "        longest = max(map(len, group))\n"
            "        group = [[*share, *list(share[-1:]) * (longest - len(share))] for share in group]\n"
            + BEGIN_UPDATE,
        ),
    ),
    Mistake(
        "the number of tokens is rank 0's times the number of ranks",
        replace(SUM_COUNTS, "        total = counts[0] * len(counts)\n"),
    ),
    Mistake(
        "the learning rate is multiplied by the number of ranks",
        replace(
            END_START,
            END_START + "        for optimizer in self.optimizers:\n"
            "            for options in optimizer.param_groups:\n"
            '                options["lr"] *= ranks\n',
        ),
    ),
    Mistake(
        "mean of the ranks' means",
        replace(
            "total = torch.stack([p.grad for p in replicas]).sum(0)",
            "means = [p.grad / max(c, 1e-9) for p, c in zip(replicas, counts)]\n"
            "total = torch.stack(means).mean(0) * count",
        ),
        base="Ddp",
    ),
    Mistake(
        "psum of gradients, pmean of counts",
        replace(
            "grads = {k: sum(g[k] for g, _, _ in parts) / count for k in params}",
            "mean_count = count / len(parts)\n"
            "grads = {k: sum(g[k] for g, _, _ in parts) / mean_count for k in params}",
        ),
        base="Optax",
    ),
    Mistake(
        "a rank without microbatches does not step",
        replace(
            "norm = torch.cat", "if not group[rank]:\n    continue\nnorm = torch.cat"
        ),
        base="Ddp",
    ),
    Mistake(
        "stops at the rank with fewest microbatches",
        replace(
            "ranks = [",
            "fewest = min(len(microbatches) for microbatches in group)\n"
            "group = [microbatches[:fewest] for microbatches in group]\nranks = [",
        ),
        base="Joined",
    ),
    Mistake(
        "sharded twice, each rank takes its stride of what it already holds",
        replace(
            "flat = [batch for microbatches in group for batch in microbatches]",
            "flat = [b for r, microbatches in enumerate(group) for b in microbatches[r :: self.ranks]]",
        ),
        base="Manual",
    ),
]
