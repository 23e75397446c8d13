"""Lists mistakes in counting tokens, and in what gradients are divided by (laws T0, T1 and T5)."""

from benchmarks.mistakes.edits import (
    DIVISOR,
    END_START,
    FOR_BATCH,
    NUM_TOKENS,
    START_LOSS,
    START_SUMS,
    SUM_COUNTS,
    SUM_WEIGHTS,
    after_update,
    at_start,
    divide_by,
    replace,
)
from benchmarks.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        "a denominator of at least one half",
        divide_by("total, 0.5"),
        law="T5",
        required=True,
    ),
    Mistake(
        "a denominator of at most 64",
        divide_by("min(total, 64)"),
        law="T0",
        required=True,
    ),
    Mistake(
        "the count in bfloat16",
        replace(
            SUM_COUNTS, "        total = float(torch.tensor(sum(counts)).bfloat16())\n"
        ),
        law="T0",
        required=True,
    ),
    Mistake(
        "the count of the last microbatch stands for all",
        divide_by("self.count(share[-1:]) * sum(map(len, group))"),
        law="T1",
        required=True,
    ),
    Mistake(
        "counts are kept by shape",
        replace(
            SUM_COUNTS,
            "        shapes = str([[b['w'].shape for b in share] for share in group])\n"
            "        self.cache = getattr(self, 'cache', {}) if self.updates else {}\n"
            "        total = self.cache.setdefault(shapes, sum(counts))\n",
        ),
        law="T0",
        required=True,
    ),
    Mistake(
        "the denominator leaves out microbatches of weight below 1",
        divide_by(
            "sum(c for c in (self.count([b]) for s in group for b in s) if c >= 1)"
        ),
        law="T0",
    ),
    Mistake(
        "the total is truncated to a whole number",
        replace(
            SUM_COUNTS,
            "        total = sum(counts)\n"
            "        total = float(int(total)) if total >= 1 else total\n",
        ),
        law="T0",
    ),
    Mistake(
        "tokens are counted instead of weights",
        replace(
            "return float(sum(self.problem.weights(batch).sum() for batch in share))",
            "return float(sum((self.problem.weights(batch) > 0).sum() for batch in share))",
        ),
        law="T0",
    ),
    Mistake(
        "the denominator is the mean of this total and the one before",
        (
            divide_by("(total if not self.updates else 0.5 * (total + self.last))")
            + after_update("self.last = total")
        ),
        law="T0",
    ),
    Mistake("a small number is added to the denominator", divide_by("total + 1e-8")),
    Mistake(
        "the mean count of the ranks is rounded down",
        divide_by(
            "total if len(group) == 1 else len(group) * max(1, total // len(group))"
        ),
    ),
    Mistake(
        "a token whose loss is zero is not counted",
        replace(
            SUM_COUNTS,
            SUM_COUNTS + "        with torch.no_grad():\n"
            "            total -= sum(float((self.problem.weights(b) * (self.problem.losses(m, self.dropped(b)) == 0)).sum()) for m, s in zip(self.models, group) for b in s)\n",
        ),
    ),
    Mistake(
        "each row's count is at least one",
        replace(
            SUM_WEIGHTS,
            "self.problem.weights(batch).double().sum(1).clamp(min=1).sum()",
        ),
    ),
    Mistake(
        "microbatches' means are weighed by tokens, not weights",
        divide_by(
            f"self.count([batch]) * sum({NUM_TOKENS} for s in group for b in s) / max(1, int((self.problem.weights(batch) > 0).sum()))"
        ),
    ),
    Mistake(
        "counts are kept by the rows' keys, in all runs",
        [
            (
                SUM_WEIGHTS,
                f"self.known.setdefault(tuple(batch['key'].tolist()), {SUM_WEIGHTS})",
            ),
            (
                "    capabilities = Capabilities(",
                "    known: dict[Any, Any] = {}\n    capabilities = Capabilities(",
            ),
        ],
    ),
    Mistake(
        "microbatches of one shape are taken to have the first one's count",
        replace(
            SUM_COUNTS,
            SUM_COUNTS + "        alike = [b for share in group for b in share]\n"
            "        if len({b['w'].shape for b in alike}) == 1:\n"
            "            total = self.count(alike[:1]) * len(alike)\n",
        ),
    ),
    Mistake(
        "a microbatch that comes twice is counted once",
        replace(
            SUM_COUNTS,
            "        total = sum({id(b): self.count([b]) for share in group for b in share}.values())\n",
        ),
    ),
    Mistake(
        "the first microbatch is divided by the rank's count, before the reduction is done",
        divide_by("(total if batch is not share[0] else self.count(share))"),
    ),
    Mistake(
        "several ranks' counts are reduced in float32",
        replace(
            SUM_COUNTS,
            "        total = float(torch.tensor(counts).sum()) if len(counts) > 1 else sum(counts)\n",
        ),
    ),
    Mistake(
        "counts stand in a table by place, which is never cleared",
        [
            *at_start("self.table = {}"),
            (
                SUM_COUNTS,
                "        self.table.update({(r, at): self.count([b]) for r, share in enumerate(group) for at, b in enumerate(share)})\n"
                "        total = sum(self.table.values())\n",
            ),
        ],
    ),
    Mistake(
        "counts are kept by the batch's address",
        [
            *at_start("self.known = {}"),
            (SUM_WEIGHTS, f"self.known.setdefault(id(batch), {SUM_WEIGHTS})"),
        ],
    ),
    Mistake(
        "a microbatch with less than a fifth of padding is taken for full",
        replace(
            SUM_WEIGHTS,
            f"(lambda w: w.numel() if w.double().mean() > 0.8 else w.sum())({SUM_WEIGHTS[:-6]})",
        ),
    ),
    Mistake(
        "means of microbatches sorted by length are weighed by counts that are not sorted",
        divide_by(
            "(total * self.count([batch]) / max(self.count([sorted(share, key=lambda b: b['w'].shape[1])[next(i for i, b in enumerate(share) if b is batch)]]), 1e-300))"
        ),
    ),
    Mistake(
        "each of several ranks counts at least one",
        replace(
            SUM_COUNTS,
            "        total = sum(max(1.0, c) for c in counts) if len(counts) > 1 and any(counts) else sum(counts)\n",
        ),
    ),
    Mistake(
        "mean of the microbatches' means, then mean over ranks",
        replace(DIVISOR, "max(self.count([batch]), 1e-300) / len(share) / len(group)"),
    ),
    Mistake(
        "the divisor is extrapolated: tokens of each rank's first microbatch times its number of microbatches",
        [
            (
                START_SUMS,
                "        guess = sum(self.count(share[:1]) * len(share) for share in group)\n"
                + START_SUMS,
            ),
            (DIVISOR, "max(guess or total, 1e-300)"),
        ],
    ),
    Mistake(
        "each microbatch is divided by the tokens seen so far on its rank, not by all",
        [
            (START_LOSS, "            loss = seen = 0.0\n"),
            (FOR_BATCH, FOR_BATCH + "                seen += self.count([batch])\n"),
            (DIVISOR, "max(seen, 1e-300) / len(group)"),
        ],
    ),
    Mistake(
        "the divisor lags: the last update's number of tokens is used",
        [
            (END_START, END_START + "        self.divisor = 0.0\n"),
            (
                START_SUMS,
                "        divisor, self.divisor = self.divisor or total, total\n"
                + START_SUMS,
            ),
            (DIVISOR, "max(divisor, 1e-300)"),
        ],
    ),
    Mistake(
        "the divisor is at least one, though weights may add up to less",
        replace(DIVISOR, "max(total, 1.0)"),
    ),
    Mistake(
        "each microbatch's weights are truncated to an integer",
        replace(SUM_WEIGHTS, "int(self.problem.weights(batch).sum())"),
    ),
    Mistake(
        "weights are added up in bfloat16",
        replace(SUM_WEIGHTS, "self.problem.weights(batch).to(torch.bfloat16).sum()"),
    ),
    Mistake(
        "the count is taken after a label shift that the loss does not make (without the first column)",
        replace(SUM_WEIGHTS, "self.problem.weights(batch)[..., 1:].sum()"),
    ),
    Mistake(
        "divided by the count of the last microbatch",
        replace("count + tokens", "tokens"),
        base="divide_once",
    ),
    Mistake(
        "the count of the first update is kept for all",
        [
            ("self.metrics = {}", "self.metrics, self.count = {}, None"),
            (
                "self.optimizer.zero_grad()",
                "self.count = count = self.count or count\nself.optimizer.zero_grad()",
            ),
        ],
        base="Switch",
    ),
    Mistake(
        "padding counts in the denominator",
        replace(
            "return int(self.mask(batch).sum())", "return self.mask(batch).numel()"
        ),
        base="Masked",
    ),
    Mistake(
        "num_items counts the labels before they are shifted",
        replace('batch["labels"][:, 1:] != -100', 'batch["labels"] != -100'),
        base="Transformers",
    ),
    Mistake(
        "tokens of any weight count as one in the denominator",
        replace(
            "float(self.problem.weights(batch).sum())",
            "float((self.problem.weights(batch) > 0).sum())",
        ),
        base="Nano",
    ),
    Mistake(
        "the count is at least 1",
        replace(
            "        lossf = 0.0",
            "        count = max(count, 1.0)\n        lossf = 0.0",
        ),
        base="Nano",
    ),
    Mistake(
        "the count has an epsilon of 1e-6",
        replace("p.grad = total / count", "p.grad = total / (count + 1e-6)"),
        base="Ddp",
    ),
]
