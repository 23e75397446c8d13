"""Names lines of the plain loop, and makes edits of them.

The loop is ``support.plain_loop``; its words below occur in it once. A reformatted or renamed line
there needs the same change here: ``proofs/test_kit.py`` plants every mistake.
"""

from benchmarks.mistakes.mistake import Edits
from proofs import plain_mutants

# start
MAKE_MODELS = "[problem.module().eval() for _ in range(ranks)]"
END_START = "        self.updates = 0\n"

# update: counts
BEGIN_UPDATE = "        counts = ["
SUM_COUNTS = plain_mutants.TOTAL
SUM_WEIGHTS = "self.problem.weights(batch).sum()"
START_SUMS = "        sums = []\n"

# update: microbatches
START_RANK = plain_mutants.ZERO
ZERO_GRAD = "            model.zero_grad()\n"
START_LOSS = "            loss = 0.0\n"
FOR_BATCH = plain_mutants.EACH
DIVISOR = "max(total, 1e-300)"
BACKWARD = plain_mutants.BACKWARD
ADD_LOSS = "                loss += objective.item()\n"
APPEND_LOSS = "            sums.append(loss)\n"

# update: reduction
BEGIN_REDUCE = "        for params in zip("
FOR_PARAMS = (
    "for params in zip(*[model.parameters() for model in self.models], strict=True):\n"
)
REDUCE = plain_mutants.REDUCED
SUM_GRADS = "torch.stack(grads).sum(0)"
STORE_REDUCED = (
    "            for p in params:\n"
    "                p.grad = whole.clone()\n"
)  # fmt: skip

# update: step
COMPUTE_NORMS = "        norms = [norm(model) for model in self.models]\n"
CHECK_FINITE = 'finite = [n < float("inf") for n in norms]'
CHECK_FINITE_LINE = f"        {CHECK_FINITE}\n"
IF_STEP = plain_mutants.GUARD
STEP = "                optimizer.step()\n"
REPORT_LOSS = '"loss": sum(sums),'
REPORT_NORM = '"grad_norm": norms[rank],'
REPORT_TOKENS = '"num_tokens": total'
END_UPDATE = "        self.updates += 1\n"

# loss
READ_WEIGHTS = plain_mutants.WEIGHTS
READ_WEIGHTS_LINE = f"        {READ_WEIGHTS}\n"
WEIGHTED_LOSSES = "weights * losses, 0"
RETURN_WEIGHTED = "        return torch.where(weights > 0, weights * losses, 0).sum()\n"

# dropout
IF_NO_DROPOUT = "if not self.problem.model.dropout:"
CLONE_INPUTS = 'x = batch["x"].clone()'
READ_KEY = 'key = int(batch["key"][row])'
SEED_EXPRESSION = "1000 * key + column"
SEED_GENERATOR = f"manual_seed({SEED_EXPRESSION})"
MAKE_GENERATOR = f"generator = torch.Generator().{SEED_GENERATOR}"
RETURN_DROPPED = 'return {**batch, "x": x}'

# evaluate
COUNT_EVALUATED = "        total = sum(self.count(share) for share in group)\n"
NOT_TRAINING = ", training=False"
RETURN_EVALUATED = "        return sum(sums) / total"
RETURN_EVALUATED_LINE = f"{RETURN_EVALUATED}\n"

# save and load
STATE = "(self.models, [o.state_dict() for o in self.optimizers], self.updates)"
SAVE = f"        return copy.deepcopy(\n            {STATE}\n        )\n"
UNPACK_SAVED = "self.models, states, self.updates = copy.deepcopy(saved)"
UNPACK_SAVED_LINE = f"        {UNPACK_SAVED}\n"
REBUILD_OPTIMIZERS_LINE = "        self.optimizers = [self.problem.optimizer(model) for model in self.models]\n"
REBUILD_OPTIMIZERS = f"{REBUILD_OPTIMIZERS_LINE}        for optimizer, state"
LOAD_OPTIMIZER = "            optimizer.load_state_dict(state)\n"

# expressions and clauses for new lines
CUT_COLUMNS = "{key: x%s if x.ndim > 1 else x for key, x in batch.items()}"
NUM_TOKENS = "int((self.problem.weights(b) > 0).sum())"
ALL_GROUPS = "for o in self.optimizers for g in o.param_groups"
OWN_GROUPS = "for g in optimizer.param_groups"
OWN_PARAMS = "self.models[rank].parameters()"
OWN_MOMENTUM = (
    "for s in optimizer.state.values() if s.get('momentum_buffer') is not None"
)
ALLOW_NO_TOKENS = [(RETURN_EVALUATED, "        return sum(sums) / max(total, 1e-300)")]


def indent(lines: tuple[str, ...], depth: int) -> str:
    """Indents lines and ends each."""
    return "".join(f"{' ' * depth}{line}\n" for line in lines)


def replace(old: str, new: str) -> Edits:
    """Replaces words of a loop."""
    return [(old, new)]


def divide_by(divisor: str) -> Edits:
    """Divides a microbatch's weighted sum by something else."""
    return plain_mutants.objective(divisor)


def scale_gradient(factor: str) -> Edits:
    """Scales the gradient of the microbatch with number ``at``."""
    return [
        (FOR_BATCH, "            for at, batch in enumerate(share):\n"),
        (BACKWARD, f"                (objective * ({factor})).backward()\n"),
    ]


def step_only_if(condition: str) -> Edits:
    """Steps only where the condition holds, too."""
    return [(IF_STEP, f"if total > 0 and finite[rank] and {condition}:")]


def replace_group(expression: str) -> Edits:
    """Replaces the group of an update."""
    return [(BEGIN_UPDATE, f"        group = {expression}\n{BEGIN_UPDATE}")]


def replace_values(expression: str) -> Edits:
    """Replaces each value ``x`` of each microbatch ``b``, for its loss and its count."""
    return replace_group(
        f"[[{{k: {expression} for k, x in b.items()}} for b in share] for share in group]"
    )


def replace_weights(expression: str) -> Edits:
    """Replaces the weights, both those that multiply and those that are counted."""
    counted = SUM_WEIGHTS.removesuffix(".sum()")
    return [
        (READ_WEIGHTS, f"{READ_WEIGHTS}\n        weights = {expression}"),
        (SUM_WEIGHTS, f"(lambda weights: ({expression}).sum())({counted})"),
    ]


def replace_batch(expression: str) -> Edits:
    """Replaces the batch of a loss and its weights."""
    return [(READ_WEIGHTS, f"batch = {expression}\n        {READ_WEIGHTS}")]


def replace_reduced(expression: str) -> Edits:
    """Replaces what rank ``r``, whose own gradient is ``own``, gets of the reduction."""
    lines = (
        "for r, (p, own) in enumerate(zip(params, grads)):",
        f"    p.grad = ({expression}).clone()",
    )
    return [(STORE_REDUCED, indent(lines, 12))]


def define_function(*lines: str) -> Edits:
    """Defines a function beside the loop."""
    return [("def norm(", "\n".join(lines) + "\n\n\ndef norm(")]


def at_start(line: str) -> Edits:
    """Inserts a line at the end of a start."""
    return [(END_START, END_START + indent((line,), 8))]


def after_count(*lines: str) -> Edits:
    """Inserts lines after all tokens are counted."""
    return [(SUM_COUNTS, SUM_COUNTS + indent(lines, 8))]


def after_backward(*lines: str) -> Edits:
    """Inserts lines after a microbatch's backward pass."""
    return [(BACKWARD, BACKWARD + indent(lines, 16))]


def after_norms(*lines: str) -> Edits:
    """Inserts lines after gradients are reduced and measured, before any step."""
    return [(CHECK_FINITE_LINE, CHECK_FINITE_LINE + indent(lines, 8))]


def before_step(line: str) -> Edits:
    """Inserts a line before the optimizer moves."""
    return [(STEP, indent((line,), 16) + STEP)]


def after_step(line: str) -> Edits:
    """Inserts a line after the optimizer has moved."""
    return [(STEP, STEP + indent((line,), 16))]


def after_update(*lines: str) -> Edits:
    """Inserts lines at the end of an update."""
    return [(END_UPDATE, END_UPDATE + indent(lines, 8))]


def before_evaluation(*lines: str) -> Edits:
    """Inserts lines before an evaluation counts its tokens."""
    return [(COUNT_EVALUATED, indent(lines, 8) + COUNT_EVALUATED)]


def after_save(*lines: str) -> Edits:
    """Inserts lines after the state is copied."""
    saved = SAVE.replace("return ", "saved = ")
    return [(SAVE, f"{saved}{indent(lines, 8)}        return saved\n")]


def after_load(*lines: str) -> Edits:
    """Inserts lines after all is loaded."""
    return [(LOAD_OPTIMIZER, LOAD_OPTIMIZER + indent(lines, 8))]
