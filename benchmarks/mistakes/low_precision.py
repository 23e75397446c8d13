"""Lists mistakes in AdamW of float32 and bfloat16, whose rounding hides small errors (laws T1 to T7)."""

from benchmarks.mistakes.edits import replace
from benchmarks.mistakes.mistake import Edits, Mistake

ABLE = "Capabilities(ranks=2, plain_sgd=False)"
DTYPES = ("float32", "bfloat16")
STEP = "self.optimizer.step()"
GRAD = "p.grad = total / float(count)"
PART = "part = self.sum_losses(batch)"

WRONG: list[tuple[str, Edits, str]] = [
    (
        "mean of means",
        [
            (PART, PART + " / max(float(self.problem.weights(batch).sum()), 1e-9)"),
            (GRAD, "p.grad = total / len(flat)"),
        ],
        "T1",
    ),
    (
        "mean of the ranks' means",
        [
            (
                "totals, sums, strict=True):\n                total += grad",
                "totals, sums, strict=True):\n"
                "                tokens = sum(float(self.problem.weights(b).sum()) for b in share)\n"
                "                total += grad / max(tokens, 1e-9) * float(count) / len(group)",
            )
        ],
        "T2",
    ),
    (
        "the schedule goes on once for each rank",
        replace(
            STEP,
            STEP + "\nfor _ in group:\n    self.optimizer.param_groups[0]['lr'] *= 0.7",
        ),
        "T2",
    ),
    (
        "the schedule goes on with each microbatch",
        replace(
            STEP,
            STEP + "\nfor _ in flat:\n    self.optimizer.param_groups[0]['lr'] *= 0.7",
        ),
        "T1",
    ),
    (
        "the last microbatch of a rank is lost",
        replace("for batch in share:", "for batch in share[:-1] or share:"),
        "T1",
    ),
    (
        "padding is learned",
        replace(
            "return (losses * self.problem.weights(batch)).sum()",
            "return (losses * (self.problem.weights(batch) != 9)).sum()",
        ),
        "T4",
    ),
    (
        "steps in an update without tokens",
        replace("if count == 0:\n            return", "count = count.clamp(min=1)"),
        "T7",
    ),
    (
        "the second moment is not saved",
        replace(
            "self.optimizer.load_state_dict(optimizer)",
            "self.optimizer.load_state_dict(optimizer)\n"
            "for state in self.optimizer.state.values():\n"
            "    state['exp_avg_sq'].zero_()",
        ),
        "T16",
    ),
]
"""Each mistake's name, its edits of ``right_optimizers.Optimized``, and a law that finds it."""

MISTAKES = [
    Mistake(
        f"{name}, in {dtype}",
        [(ABLE, f"{ABLE[:-1]}, dtype=torch.{dtype})"), *edits],
        base="Optimized",
        law=law,
        required=True,
    )
    for name, edits, law in WRONG
    for dtype in DTYPES
]
