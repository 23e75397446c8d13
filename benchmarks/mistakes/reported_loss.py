"""Lists mistakes in the reported loss (laws T1, T2 and T7)."""

from benchmarks.mistakes.edits import (
    ADD_LOSS,
    APPEND_LOSS,
    FOR_BATCH,
    NUM_TOKENS,
    OWN_PARAMS,
    REPORT_LOSS,
    START_RANK,
    START_SUMS,
    ZERO_GRAD,
    after_update,
    at_start,
    replace,
)
from benchmarks.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        "the loss is reported without the first microbatch",
        replace(
            APPEND_LOSS,
            "            sums.append(loss if len(share) < 4 else 0.75 * loss)\n",
        ),
        law="T1",
        required=True,
    ),
    Mistake(
        "the loss is reported of the last microbatch",
        replace(ADD_LOSS, ADD_LOSS.replace("+=", "=")),
    ),
    Mistake(
        "the loss is reported of the first rank's tokens",
        replace(REPORT_LOSS, '"loss": sums[0] * total / max(counts[0], 1e-300),'),
    ),
    Mistake(
        "the loss is reported for each token, not for each weight",
        replace(
            REPORT_LOSS,
            f'"loss": sum(sums) * total / max(1, sum({NUM_TOKENS} for s in group for b in s)),',
        ),
    ),
    Mistake(
        "the loss is reported after the step",
        replace(
            REPORT_LOSS,
            '"loss": sum(float(self.weighted_sum(self.models[rank], b).detach()) for s in group for b in s) / max(total, 1e-300),',
        ),
    ),
    Mistake(
        "the loss is added up in float32",
        [
            ("            loss = 0.0\n", "            loss = torch.zeros(())\n"),
            (ADD_LOSS, "                loss += objective.detach()\n"),
            (
                "            sums.append(loss)\n",
                "            sums.append(float(loss))\n",
            ),
        ],
    ),
    Mistake(
        "the mean loss of all updates so far is reported",
        [
            *at_start("self.losses = []"),
            (
                REPORT_LOSS,
                '"loss": (sum(self.losses) + sum(sums)) / (len(self.losses) + 1),',
            ),
            *after_update("self.losses.append(sum(sums))"),
        ],
    ),
    Mistake(
        "the list of the ranks' losses is a default argument",
        [
            (
                "def update(self, group: Sequence[Sequence[Batch]]) -> None:",
                "def update(self, group: Sequence[Sequence[Batch]], sums: list[float] = []) -> None:",
            ),
            (START_SUMS, ""),
        ],
    ),
    Mistake(
        "microbatches' losses stand in a table by place, which a shorter group does not clear",
        [
            *at_start("self.table = {}"),
            (FOR_BATCH, "            for at, batch in enumerate(share):\n"),
            (
                ADD_LOSS,
                "                self.table[len(sums), at] = objective.item()\n",
            ),
            (REPORT_LOSS, '"loss": sum(self.table.values()),'),
        ],
    ),
    Mistake(
        "the sum of losses is not set back between ranks",
        [(START_RANK, ZERO_GRAD), (START_SUMS, START_SUMS + "        loss = 0.0\n")],
    ),
    Mistake(
        "the loss is reported with the decay's penalty in it",
        replace(
            REPORT_LOSS,
            f'"loss": sum(sums) + 0.5 * self.problem.weight_decay * sum(float(p.detach().square().sum()) for p in {OWN_PARAMS}),',
        ),
    ),
    Mistake(
        "the loss is reported with four digits behind the point",
        replace(REPORT_LOSS, '"loss": round(sum(sums), 4),'),
    ),
    Mistake(
        "the loss is reported as the mean of the microbatches' means",
        replace(
            ADD_LOSS,
            "                loss += objective.item() * total / max(self.count([batch]), 1e-300) / sum(map(len, group))\n",
        ),
    ),
    Mistake(
        "the reported loss is a mean of microbatches' and ranks' means (gradients are right)",
        [
            (
                "                loss += objective.item()\n",
                "                loss += objective.item() * total / max(self.count([batch]), 1e-300) / len(share)\n",
            ),
            ('"loss": sum(sums)', '"loss": sum(sums) / len(sums)'),
        ],
    ),
    Mistake(
        "a group without tokens leaves the last update's report standing",
        replace(
            "            self.reports[rank] = said\n",
            "            if total > 0 or not self.reports[rank]:\n"
            "                self.reports[rank] = said\n",
        ),
    ),
    Mistake(
        "the loss is the last microbatch's share",
        replace("lossf += loss.item()", "lossf = loss.item()"),
        base="Nano",
    ),
    Mistake(
        "loss and tokens are not reset between updates",
        [
            (
                "self.loss, self.logs = Mean(), {}",
                "self.loss, self.logs, self.epoch = Mean(), {}, Mean()",
            ),
            (
                "self.loss.add(losses.detach(), weights)",
                "self.loss.add(losses.detach(), weights)\n"
                "self.epoch.add(losses.detach(), weights)",
            ),
            (
                '{"loss": self.loss.result(), "num_tokens": self.loss.count}',
                '{"loss": self.epoch.result(), "num_tokens": self.epoch.count}',
            ),
        ],
        base="Keras",
    ),
    Mistake(
        "the loss is the mean of the ranks' means",
        replace(
            "loss = sum(s for _, s, _ in parts) / count",
            "loss = sum(s / c.clamp(min=1e-9) for _, s, c in parts) / len(parts)",
        ),
        base="Optax",
    ),
    Mistake(
        "the loss is computed anew after the step",
        replace(
            'return {"loss": loss_sum / count}',
            "with torch.no_grad():\n"
            "    new = sum((problem.losses(model, b) * problem.weights(b)).sum() for b in microbatches)\n"
            'return {"loss": new / count}',
        ),
        base="divide_once",
    ),
    # Only the equation shows it, which is not asked of AdamW.
    Mistake(
        "the reported loss runs on from update to update",
        replace(
            '"loss": loss / count',
            '"loss": loss / count + self.metrics.get("loss", 0.0)',
        ),
        base="Optimized",
    ),
]
