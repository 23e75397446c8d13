"""Lists mistakes in the random numbers of dropout (law T15)."""

from benchmarks.mistakes.edits import (
    FOR_BATCH,
    IF_NO_DROPOUT,
    MAKE_GENERATOR,
    READ_KEY,
    RETURN_DROPPED,
    SEED_EXPRESSION,
    SEED_GENERATOR,
    ZERO_GRAD,
    after_load,
    after_update,
    at_start,
    before_evaluation,
    replace,
)
from benchmarks.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        "noise follows the number of the update and the microbatch's rows",
        replace(
            "manual_seed(1000 * key + column)",
            "manual_seed(1000 * key + column + 77 * (rows > 3))",
        ),
        law="T15",
        required=True,
    ),
    Mistake(
        "noise follows the key of the first row",
        replace('key = int(batch["key"][row])', 'key = int(batch["key"][0])'),
        law="T15",
    ),
    Mistake(
        "noise follows the length of the rows",
        replace(
            "manual_seed(1000 * key + column)",
            "manual_seed(1000 * key + column + 7 * length)",
        ),
        law="T15",
    ),
    Mistake(
        "noise follows the position of a row",
        replace(
            "manual_seed(1000 * key + column)",
            "manual_seed(1000 * key + column + 131 * (row > 1))",
        ),
        law="T15",
    ),
    Mistake(
        "noise follows the number of the update, which a load forgets",
        [
            (
                "manual_seed(1000 * key + column)",
                "manual_seed(1000 * key + column + 7919 * self.updates)",
            ),
            (
                "self.models, states, self.updates = copy.deepcopy(saved)",
                "self.models, states, _ = copy.deepcopy(saved)",
            ),
        ],
    ),
    Mistake(
        "noise seeds the global generator",
        replace(MAKE_GENERATOR, "generator = torch.manual_seed(1000 * key + column)"),
    ),
    Mistake(
        "noise comes from one generator that goes on",
        [
            *at_start("self.generator = torch.Generator().manual_seed(0)"),
            (MAKE_GENERATOR, "generator = self.generator"),
        ],
    ),
    Mistake(
        "keys sorted by length are not put back",
        replace(
            'key = int(batch["key"][row])',
            'key = int(batch["key"][(batch["w"] > 0).sum(1).argsort(stable=True, descending=True)][row])',
        ),
    ),
    Mistake(
        "after an evaluation elements are dropped no more",
        [
            *at_start("self.evaluating = False"),
            (IF_NO_DROPOUT, "if not self.problem.model.dropout or self.evaluating:"),
            *before_evaluation("self.evaluating = True"),
        ],
    ),
    Mistake(
        "noise follows the rank",
        [
            (
                "for model, share in zip(self.models, group, strict=True):",
                "for self.rank, (model, share) in enumerate(zip(self.models, group, strict=True)):",
            ),
            (SEED_GENERATOR, "manual_seed(1000 * key + column + 7919 * self.rank)"),
        ],
    ),
    Mistake(
        "noise follows the number of evaluations before",
        [
            *at_start("self.evaluations = 0"),
            *before_evaluation("self.evaluations += 1"),
            (
                SEED_GENERATOR,
                "manual_seed(1000 * key + column + 7919 * self.evaluations)",
            ),
        ],
    ),
    Mistake(
        "a second run has other noise",
        [
            *at_start("self.runs = getattr(self, 'runs', -1) + 1"),
            (SEED_GENERATOR, "manual_seed(1000 * key + column + 7919 * self.runs)"),
        ],
    ),
    Mistake(
        "a token all of whose elements are dropped is taken for padding",
        replace(
            "        losses = self.problem.losses(model, self.dropped(batch) if training else batch)\n",
            "        batch = self.dropped(batch) if training else batch\n"
            "        weights = weights * (batch['x'] != 0).any(-1)\n"
            "        losses = self.problem.losses(model, batch)\n",
        ),
    ),
    Mistake(
        "the update after a load drops no elements",
        [
            *at_start("self.resumed = False"),
            (IF_NO_DROPOUT, "if not self.problem.model.dropout or self.resumed:"),
            *after_load("self.resumed = True"),
            *after_update("self.resumed = False"),
        ],
    ),
    Mistake(
        "noise follows the number of the rank's microbatches",
        [
            (FOR_BATCH, "            self.number = len(share)\n" + FOR_BATCH),
            (SEED_GENERATOR, "manual_seed(1000 * key + column + 7919 * self.number)"),
        ],
    ),
    Mistake(
        "noise is kept by the microbatch's shape",
        [
            *at_start("self.masks = {}"),
            ('x = batch["x"].clone()', 'x = torch.ones_like(batch["x"])'),
            (
                'return {**batch, "x": x}',
                'return {**batch, "x": batch["x"] * self.masks.setdefault(x.shape, x)}',
            ),
        ],
    ),
    Mistake(
        "noise is kept by key in the length that came first, and a longer row's rest has none",
        [
            *at_start("self.lengths = {}"),
            (
                READ_KEY,
                f"{READ_KEY}\n"
                "                if column >= self.lengths.setdefault(key, length):\n"
                "                    continue",
            ),
        ],
    ),
    Mistake(
        "noise follows the columns that are left where those that all rows ignore are taken out",
        replace(
            SEED_GENERATOR,
            "manual_seed(1000 * key + int((batch['w'][:, :column] > 0).any(0).sum()))",
        ),
    ),
    Mistake(
        "what is kept is enlarged by the part of the microbatch that was kept",
        replace(
            RETURN_DROPPED,
            'return {**batch, "x": x * (0.5 * int((batch["x"] != 0).sum()) / max(1, int((x != 0).sum())))}',
        ),
    ),
    Mistake(
        "a microbatch's rows are numbered on from the first one's key",
        replace(READ_KEY, 'key = int(batch["key"][0]) + row'),
    ),
    Mistake(
        "dropout's seed is made of the key and the padded length",
        replace(SEED_EXPRESSION, "length * key + column"),
    ),
    Mistake(
        "dropout draws from one generator for a microbatch, seeded by its first row's key",
        [
            (
                "                generator = torch.Generator().manual_seed(1000 * key + column)\n",
                "",
            ),
            (
                "        for row in range(rows):\n",
                '        generator = torch.Generator().manual_seed(int(batch["key"][:1].sum()))\n'
                "        for row in range(rows):\n",
            ),
        ],
    ),
    Mistake(
        "dropout's seed is offset by the rank",
        [
            (ZERO_GRAD, "            self.rank = len(sums)\n" + ZERO_GRAD),
            (SEED_EXPRESSION, SEED_EXPRESSION + " + self.rank"),
        ],
    ),
    Mistake(
        "seeded by the place of the row in its microbatch",
        replace(
            'torch.manual_seed(1000 + int(one["key"]))',
            "torch.manual_seed(1000 + 100 * index + row)",
        ),
        base="Evaluator",
    ),
    Mistake(
        "seeded by key and rank",
        replace(
            'torch.manual_seed(1000 + int(one["key"]))',
            'torch.manual_seed(1000 * (1 + rank) + int(one["key"]))',
        ),
        base="Evaluator",
    ),
    Mistake(
        "one of the ways to compute a gradient recomputes with other noise",
        replace(
            "self.losses(batch)",
            "self.losses({**batch, 'key': batch['key'] + 7 * (self.setting == 'grad')}"
            " if 'key' in batch else batch)",
        ),
        base="Switch",
        law="T17",
        required=True,
    ),
]
