"""Lists mistakes in which microbatches make an update (laws T1, T3 and T14)."""

from benchmarks.mistakes.edits import (
    BEGIN_UPDATE,
    END_START,
    FOR_BATCH,
    SUM_COUNTS,
    after_count,
    after_update,
    at_start,
    define_function,
    replace,
    replace_group,
    scale_gradient,
    step_only_if,
)
from benchmarks.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        "of seven microbatches or more the last is left out",
        scale_gradient("not (len(share) >= 7 and at == len(share) - 1)"),
        law="T1",
        required=True,
    ),
    Mistake(
        "no step where the last microbatch is empty",
        step_only_if("(not group[-1] or self.count(group[-1][-1:]) > 0)"),
        law="T1",
        required=True,
    ),
    Mistake(
        "an empty microbatch ends the loop",
        replace(
            FOR_BATCH,
            FOR_BATCH + "                if not self.count([batch]):\n"
            "                    break\n",
        ),
        law="T1",
        required=True,
    ),
    Mistake(
        "no step with eight microbatches",
        step_only_if("len(group[rank]) != 8"),
        law="T1",
    ),
    Mistake(
        "of microbatches with one count the last alone is used",
        replace(
            FOR_BATCH,
            "            for batch in {self.count([b]): b for b in share}.values():\n",
        ),
        law="T1",
    ),
    Mistake(
        "of microbatches with one shape the last alone is used",
        replace(
            FOR_BATCH,
            "            for batch in {str(b['w'].shape): b for b in share}.values():\n",
        ),
        law="T1",
    ),
    Mistake(
        "a group shorter than the first makes no step",
        [
            *at_start("self.full = 0"),
            (
                SUM_COUNTS,
                SUM_COUNTS + "        self.full = self.full or max(map(len, group))\n",
            ),
            *step_only_if("max(map(len, group)) >= self.full"),
        ],
    ),
    Mistake(
        "microbatches beyond the number of the first group are left out",
        (
            at_start("self.full = 0")
            + replace_group("[share[: self.full or len(share)] for share in group]")
            + after_update("self.full = self.full or max(map(len, group))")
        ),
    ),
    Mistake(
        "more than four microbatches make two updates",
        replace(
            "        counts = [",
            "        if max(map(len, group), default=0) > 4:\n"
            "            self.update([share[:4] for share in group])\n"
            "            group = [share[4:] for share in group]\n"
            "        counts = [",
        ),
    ),
    Mistake(
        "a microbatch is scaled by its rows over those of the first",
        scale_gradient("len(batch['w']) / len(share[0]['w'])"),
    ),
    Mistake(
        "steps come at multiples of the first group's length in all microbatches so far",
        (
            at_start("self.full, self.seen = 0, 0")
            + after_count(
                "self.full = self.full or max(map(len, group))",
                "self.seen += max(map(len, group))",
            )
            + step_only_if("self.full and self.seen % self.full == 0")
        ),
    ),
    Mistake(
        "microbatches are taken in pairs and an odd one is left out",
        replace_group(
            "[share[: len(share) // 2 * 2 or len(share)] for share in group]"
        ),
    ),
    Mistake(
        "microbatches beyond a budget of 32 tokens wait for the next update",
        [
            *at_start("self.waiting = [[] for _ in range(ranks)]"),
            (
                BEGIN_UPDATE,
                "        group, self.waiting = budgeted(self.waiting, group)\n"
                + BEGIN_UPDATE,
            ),
            *define_function(
                "def budgeted(waiting, group):",
                "    taken, left = [], []",
                "    for old, share in zip(waiting, group, strict=True):",
                "        now, later, tokens = [], [], 0",
                "        for b in [*old, *share]:",
                "            tokens += b['w'].numel()",
                "            (later if now and tokens > 32 else now).append(b)",
                "        taken.append(now)",
                "        left.append(later)",
                "    return taken, left",
            ),
        ],
    ),
    Mistake(
        "steps after every two microbatches and once more for the remainder",
        replace(
            BEGIN_UPDATE,
            "        if max(map(len, group)) > 2:\n"
            "            self.update([share[:2] for share in group])\n"
            "            return self.update([share[2:] for share in group])\n"
            + BEGIN_UPDATE,
        ),
    ),
    Mistake(
        "boundary off by one: a group's last microbatch is taken into the next update's window",
        [
            (END_START, END_START + "        self.late = [[] for _ in range(ranks)]\n"),
            (
                BEGIN_UPDATE,
                "        late, self.late = self.late, [share[-1:] for share in group]\n"
                "        group = [[*old, *share[:-1]] for old, share in zip(late, group, strict=True)]\n"
                + BEGIN_UPDATE,
            ),
        ],
    ),
    Mistake(
        "the first microbatch of the first update is used up by a peek and not trained on",
        replace(FOR_BATCH, "            for batch in share[self.updates == 0 :]:\n"),
    ),
    Mistake(
        "breaks at a microbatch without tokens",
        replace("continue", "break"),
        base="divide_once",
    ),
    Mistake(
        "windows of two, an odd last microbatch is dropped",
        replace(
            "count = sum(", "flat = flat[: len(flat) // 2 * 2] or flat\ncount = sum("
        ),
        base="Manual",
    ),
    Mistake(
        "synchronises and steps at each second microbatch, the rest stays for later",
        replace("step == steps - 1", "(step + 1) % 2 == 0"),
        base="Lockstep",
    ),
    Mistake(
        "steps after each microbatch",
        [
            (
                "for name, g in zip(\n"
                "    params, torch.autograd.grad(loss, list(params.values())), strict=False\n"
                "):\n"
                "    gradient[name] += g / count",
                "grads = torch.autograd.grad(loss, list(params.values()))\n"
                "self.step({name: g / count for name, g in zip(params, grads)})",
            ),
            ("    self.step(gradient)\n", "    pass\n"),
        ],
        base="Manual",
    ),
]
