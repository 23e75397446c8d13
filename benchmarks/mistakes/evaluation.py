"""Lists mistakes in the mean that an evaluation computes (laws T1 and T2)."""

from benchmarks.mistakes.edits import (
    ALLOW_NO_TOKENS,
    COUNT_EVALUATED,
    RETURN_EVALUATED,
    RETURN_EVALUATED_LINE,
    SUM_COUNTS,
    at_start,
    before_evaluation,
    define_function,
    replace,
)
from benchmarks.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        "evaluation averages the means of batches",
        replace(
            "return sum(sums) / total",
            "return sum(s / max(self.count([b]), 1e-300) for s, b in zip(sums, batches)) / len(batches)",
        ),
        law="T1",
    ),
    Mistake(
        "evaluation drops a last batch that is not full",
        [
            (
                COUNT_EVALUATED,
                "        rows = max(len(b['w']) for share in group for b in share)\n"
                "        group = [[b for b in share if b is not share[-1] or len(b['w']) == rows] for share in group]\n"
                + COUNT_EVALUATED,
            ),
            (
                "        return sum(sums) / total",
                "        return sum(sums) / max(total, 1e-300)",
            ),
        ],
    ),
    Mistake(
        "evaluation keeps its first count",
        [
            *at_start("self.tokens = 0.0"),
            (
                COUNT_EVALUATED,
                "        total = self.tokens = self.tokens or sum(self.count(share) for share in group)\n",
            ),
        ],
    ),
    Mistake(
        "evaluation adds up in float32",
        replace(
            "return sum(sums) / total", "return float(torch.tensor(sums).sum() / total)"
        ),
    ),
    Mistake(
        "evaluation fills shorter ranks up with their batches again",
        before_evaluation(
            "most = max(map(len, group))",
            "group = [[s[i % len(s)] for i in range(most)] if s else [] for s in group]",
        ),
    ),
    Mistake(
        "evaluation is of the first rank's batches alone",
        before_evaluation(
            "group = [share for share in group if self.count(share)][:1]"
        ),
    ),
    Mistake(
        "evaluation weighs batches' means by their rows",
        replace(
            RETURN_EVALUATED,
            "        means = [s / max(self.count([b]), 1e-300) * len(b['w']) for s, b in zip(sums, batches)]\n"
            "        return sum(means) / sum(len(b['w']) for b in batches)",
        ),
    ),
    Mistake(
        "evaluation of a batch without tokens is nothing divided by nothing",
        replace(
            "float(self.weighted_sum(self.models[0], b, training=False))",
            "float(self.weighted_sum(self.models[0], b, training=False) / self.count([b])) * self.count([b])",
        ),
    ),
    Mistake(
        "evaluation cuts rows at the longest that were trained on",
        [
            *at_start("self.longest = 0"),
            (
                SUM_COUNTS,
                SUM_COUNTS
                + "        self.longest = max([self.longest, *(b['w'].shape[1] for s in group for b in s)])\n",
            ),
            *before_evaluation(
                "cut = self.longest or None",
                "group = [[{k: x[:, :cut] if x.ndim > 1 else x for k, x in b.items()} for b in s] for s in group]",
            ),
            (RETURN_EVALUATED, "        return sum(sums) / max(total, 1e-300)"),
        ],
    ),
    Mistake(
        "evaluation takes all counted tokens alike, whatever they weigh",
        before_evaluation(
            "group = [[{**b, 'w': (b['w'] > 0).to(b['w'].dtype)} for b in s] for s in group]"
        ),
    ),
    Mistake(
        "evaluation is of each rank's first four batches",
        (before_evaluation("group = [share[:4] for share in group]") + ALLOW_NO_TOKENS),
    ),
    Mistake(
        "evaluation is the mean of the ranks' means",
        replace(
            RETURN_EVALUATED,
            "        with torch.no_grad():\n"
            "            means = [sum(float(self.weighted_sum(self.models[0], b, training=False)) for b in s) / self.count(s) for s in group if self.count(s)]\n"
            "        return sum(means) / len(means)",
        ),
    ),
    Mistake(
        "evaluation before the first update is a check of two batches",
        (
            before_evaluation(
                "group = [share[: None if self.updates else 2] for share in group]"
            )
            + ALLOW_NO_TOKENS
        ),
    ),
    Mistake(
        "evaluation divides by all tokens, ignored ones too",
        replace(
            COUNT_EVALUATED,
            "        total = sum(self.problem.weights(b).numel() for share in group for b in share)\n",
        ),
    ),
    Mistake(
        "an evaluation's sums are not set back before the next",
        [
            *at_start("self.metric = (0.0, 0.0)"),
            (
                RETURN_EVALUATED,
                "        self.metric = (self.metric[0] + sum(sums), self.metric[1] + total)\n"
                "        return self.metric[0] / self.metric[1]",
            ),
        ],
    ),
    Mistake(
        "evaluation takes rows of one key once",
        [
            *before_evaluation(
                "met: set[int] = set()",
                "group = [[fresh(batch, met) for batch in share] for share in group]",
            ),
            *define_function(
                "def fresh(batch, met):",
                "    if 'key' not in batch:",
                "        return batch",
                "    rows = [i for i, k in enumerate(batch['key'].tolist()) if not (k in met or met.add(k))]",
                "    return {k: x[rows] for k, x in batch.items()}",
            ),
        ],
    ),
    Mistake(
        "evaluation drops batches with fewer rows than the first",
        [
            (
                "        with torch.no_grad():\n",
                '        batches = [b for b in batches if len(b["x"]) >= len(batches[0]["x"])]\n'
                "        with torch.no_grad():\n",
            ),
            (
                RETURN_EVALUATED_LINE,
                "        return sum(sums) / max(self.count(batches), 1e-300)\n",
            ),
        ],
    ),
    Mistake(
        "evaluation averages the ranks' means",
        replace(
            RETURN_EVALUATED_LINE,
            "        each = iter(sums)\n"
            "        means = [sum(next(each) for _ in share) / max(self.count(share), 1e-300) for share in group]\n"
            "        return sum(means) / len(means)\n",
        ),
    ),
    Mistake(
        "mean of the microbatches' means",
        replace(
            "metric.add(\n"
            "    self.problem.losses(self.model, batch), self.problem.weights(batch)\n"
            ")",
            "one = Mean()\n"
            "one.add(self.problem.losses(self.model, batch), self.problem.weights(batch))\n"
            "if one.count:\n"
            "    metric.total, metric.count = metric.total + one.result(), metric.count + 1",
        ),
        base="Keras",
    ),
    Mistake(
        "only rank 0's rows",
        replace(
            "for microbatches in group:\n"
            "            for batch in microbatches:\n"
            "                s, c",
            "for microbatches in group[:1]:\n"
            "    for batch in microbatches:\n"
            "        s, c",
        ),
        base="Optax",
    ),
    Mistake(
        "the last microbatch is dropped where there are several",
        replace(
            "for inputs in microbatches:\n                total",
            "for inputs in microbatches[:-1] or microbatches:\n    total",
        ),
        base="Transformers",
    ),
    Mistake(
        "ignored tokens count, weights do not",
        [
            ("total + (losses * weights).sum(),", "total + losses.sum(),"),
            ("count + weights.sum(),", "count + torch.tensor(losses.numel()),"),
        ],
        base="Evaluator",
    ),
]
