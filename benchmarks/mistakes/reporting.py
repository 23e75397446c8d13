"""Lists mistakes in the reported norm and number of tokens (laws T0, T2 and T7)."""

from benchmarks.mistakes.edits import (
    APPEND_LOSS,
    BEGIN_REDUCE,
    CHECK_FINITE,
    COUNT_EVALUATED,
    OWN_PARAMS,
    REPORT_NORM,
    REPORT_TOKENS,
    START_SUMS,
    SUM_COUNTS,
    after_update,
    at_start,
    replace,
)
from benchmarks.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        "the norm is that of the weights alone",
        replace(
            '"grad_norm": norms[rank],',
            '"grad_norm": float(self.models[rank].weight.grad.norm()),',
        ),
        law="T0",
        required=True,
    ),
    Mistake(
        "the norm is reported as at most 4",
        replace('"grad_norm": norms[rank],', '"grad_norm": min(norms[rank], 4),'),
        law="T0",
        required=True,
    ),
    Mistake(
        "the count is reported as a whole number",
        replace('"num_tokens": total', '"num_tokens": int(total)'),
        law="T0",
        required=True,
    ),
    Mistake(
        "with three ranks the norm is reported twice as large",
        replace(
            '"grad_norm": norms[rank],',
            '"grad_norm": norms[rank] * (2 if len(group) == 3 else 1),',
        ),
        law="T2",
    ),
    Mistake(
        "the norm is reported of the update before",
        [
            *at_start("self.norm = None"),
            (
                REPORT_NORM,
                '"grad_norm": norms[rank] if self.norm is None else self.norm,',
            ),
            *after_update("self.norm = norms[0]"),
        ],
    ),
    Mistake(
        "the bias is in the norm once for each rank",
        replace(
            REPORT_NORM,
            '"grad_norm": norms[rank] if len(group) == 1 else float(sum(p.grad.square().sum() * (1 if p.ndim else len(group)) for p in self.models[rank].parameters()).sqrt()),',
        ),
    ),
    Mistake(
        "the number of tokens is reported, not their weight",
        replace(
            REPORT_TOKENS,
            '"num_tokens": float(sum((self.problem.weights(b) > 0).sum() for s in group for b in s))',
        ),
    ),
    Mistake(
        "a rank without microbatches reports what it did before",
        replace(
            "            self.reports[rank] = said\n",
            "            if group[rank] or not self.updates:\n"
            "                self.reports[rank] = said\n",
        ),
    ),
    Mistake(
        "the norm is reported with the decay in it",
        [
            (
                CHECK_FINITE,
                CHECK_FINITE + "\n"
                "        shown = [float(sum((p.grad + self.problem.weight_decay * p.data).square().sum() for p in m.parameters()).sqrt()) for m in self.models]",
            ),
            (REPORT_NORM, '"grad_norm": shown[rank],'),
        ],
    ),
    Mistake(
        "the leaves' norms are added up",
        replace(
            REPORT_NORM,
            f'"grad_norm": sum(float(p.grad.norm()) for p in {OWN_PARAMS}),',
        ),
    ),
    Mistake(
        "tokens are reported since the last step that was made",
        [
            *at_start("self.tokens = 0.0"),
            (SUM_COUNTS, SUM_COUNTS + "        self.tokens += total\n"),
            (REPORT_TOKENS, '"num_tokens": self.tokens'),
            *after_update("self.tokens = 0.0 if all(finite) else self.tokens"),
        ],
    ),
    Mistake(
        "the tokens of an evaluation are reported with the next update's",
        [
            *at_start("self.tokens = 0.0"),
            (COUNT_EVALUATED, COUNT_EVALUATED + "        self.tokens += total\n"),
            (REPORT_TOKENS, '"num_tokens": total + self.tokens'),
            *after_update("self.tokens = 0.0"),
        ],
    ),
    Mistake(
        "an update without tokens reports the norm before",
        [
            *at_start("self.norm = 0.0"),
            (REPORT_NORM, '"grad_norm": norms[rank] if total else self.norm,'),
            *after_update("self.norm = norms[0] if total else self.norm"),
        ],
    ),
    Mistake(
        "a skipped update reports no tokens",
        replace(REPORT_TOKENS, '"num_tokens": total if finite[rank] else 0.0'),
    ),
    Mistake(
        "the norm is reported of the ranks' gradients side by side",
        [
            (
                BEGIN_REDUCE,
                "        shards = sum(float(p.grad.square().sum()) for m in self.models for p in m.parameters() if p.grad is not None) ** 0.5\n"
                + BEGIN_REDUCE,
            ),
            (REPORT_NORM, '"grad_norm": shards,'),
        ],
    ),
    Mistake(
        "the number of tokens is reduced to the first rank alone",
        replace(REPORT_TOKENS, '"num_tokens": counts[rank] if rank else total'),
    ),
    Mistake(
        "at least one token is reported",
        replace(REPORT_TOKENS, '"num_tokens": max(total, 1.0)'),
    ),
    Mistake(
        "the norm is reported of the momentum",
        replace(
            REPORT_NORM,
            '"grad_norm": sum(float(s["momentum_buffer"].square().sum()) for s in optimizer.state.values() if s.get("momentum_buffer") is not None) ** 0.5 or norms[rank],',
        ),
    ),
    Mistake(
        "the norm's squares are added up in float32",
        replace("[p.grad.square().sum()", "[p.grad.float().square().sum()"),
    ),
    Mistake(
        "the reported number of tokens adds up over updates",
        replace(
            '"num_tokens": total',
            '"num_tokens": total + self.reports[rank].get("num_tokens", 0.0)',
        ),
    ),
    Mistake(
        "the reported gradient norm is the rank's own, from before the reduction",
        [
            (START_SUMS, "        sums, local = [], []\n"),
            (
                APPEND_LOSS,
                APPEND_LOSS
                + "            grads = [p.grad for p in model.parameters() if p.grad is not None]\n"
                "            local.append(sum(float(grad.square().sum()) for grad in grads) ** 0.5)\n",
            ),
            ('"grad_norm": norms[rank]', '"grad_norm": local[rank]'),
        ],
    ),
    Mistake(
        "the norm is that of the rank's own gradient",
        [
            (
                "for replicas in zip(",
                "own = [torch.cat([p.grad.flatten() / count for p in m.parameters()]).norm()\n"
                "       for m in self.models]\nfor replicas in zip(",
            ),
            ("norm.item()", "own[rank].item()"),
        ],
        base="Ddp",
    ),
    Mistake(
        "the norm is the sum of the parameters' norms",
        [
            (
                "squares = sum(p.grad.square().sum() for p in self.model.parameters())",
                "norm = sum(p.grad.norm() for p in self.model.parameters())",
            ),
            ("squares.sqrt()", "norm"),
        ],
        base="Switch",
    ),
]
