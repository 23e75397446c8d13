"""Lists mistakes that touch the caller's data, global state or another run (law T6)."""

from benchmarks.mistakes.edits import (
    APPEND_LOSS,
    BACKWARD,
    CLONE_INPUTS,
    FOR_BATCH,
    IF_NO_DROPOUT,
    SEED_GENERATOR,
    after_backward,
    after_load,
    after_save,
    after_update,
    at_start,
    before_evaluation,
    before_step,
    replace,
)
from benchmarks.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        "momentum stays from the run before",
        replace(
            "        self.updates = 0\n",
            "        self.updates = 0\n"
            "        for kept, now in zip(getattr(self, 'kept', []), self.optimizers):\n"
            "            for one, other in zip(kept.param_groups[0]['params'], now.param_groups[0]['params']):\n"
            "                now.state[other].update(kept.state[one])\n"
            "        self.kept = self.optimizers\n",
        ),
        law="T6",
        required=True,
    ),
    Mistake(
        "torch is seeded at each update",
        after_update("torch.manual_seed(0)"),
        law="T6",
        required=True,
    ),
    Mistake(
        "NumPy's generator is used",
        after_update("__import__('numpy').random.rand()"),
        law="T6",
        required=True,
    ),
    Mistake(
        "the default dtype is set",
        after_update("torch.set_default_dtype(torch.float64)"),
        law="T6",
        required=True,
    ),
    Mistake(
        "the batch is overwritten",
        replace(BACKWARD, BACKWARD + "                batch['w'].zero_()\n"),
        law="T6",
        required=True,
    ),
    Mistake(
        "the list of microbatches is used up",
        replace(APPEND_LOSS, APPEND_LOSS + "            share.clear()\n"),
        law="T6",
        required=True,
    ),
    Mistake(
        "an update draws from Python's generator",
        after_update("__import__('random').random()"),
        law="T6",
    ),
    Mistake(
        "gradients are off after an update",
        [
            *after_update("torch.set_grad_enabled(False)"),
            (
                "        sums = []\n        for model, share",
                "        torch.set_grad_enabled(True)\n"
                "        sums = []\n"
                "        for model, share",
            ),
        ],
        law="T6",
    ),
    Mistake(
        "an update sets the number of threads",
        after_update("torch.set_num_threads(2)"),
        law="T6",
    ),
    Mistake(
        "an update sets an environment variable",
        after_update("__import__('os').environ.update(SEEN='1')"),
    ),
    Mistake(
        "elements are dropped in the caller's batch",
        replace('x = batch["x"].clone()', 'x = batch["x"]'),
    ),
    Mistake(
        "the key is taken out of the caller's batch",
        replace(BACKWARD, BACKWARD + "                batch.pop('key', None)\n"),
    ),
    Mistake(
        "the caller's inputs are made to require grad",
        replace(FOR_BATCH, FOR_BATCH + "                batch['x'].requires_grad_()\n"),
    ),
    Mistake(
        "the caller's microbatches are sorted in place",
        replace(
            FOR_BATCH,
            "            if isinstance(share, list):\n"
            "                share.sort(key=lambda batch: batch['w'].shape[1])\n"
            + FOR_BATCH,
        ),
    ),
    Mistake(
        "a second run keeps the first one's learning rate",
        (
            at_start("self.rate = getattr(self, 'rate', problem.learning_rate)")
            + before_step("[g.update(lr=self.rate) for g in optimizer.param_groups]")
        ),
    ),
    Mistake(
        "the first rank trains the caller's own model",
        replace(
            "[problem.module().eval() for _ in range(ranks)]",
            "[problem.module().eval() if r else problem.model.eval() for r in range(ranks)]",
        ),
    ),
    Mistake(
        "targets of ignored tokens are filled in the caller's batch",
        replace(
            FOR_BATCH,
            FOR_BATCH
            + "                batch['y'].masked_fill_(self.problem.weights(batch) == 0, 0)\n",
        ),
    ),
    Mistake(
        "shorter ranks are filled up in the caller's lists",
        replace(
            "        counts = [",
            "        for share in group:\n"
            "            while isinstance(share, list) and len(share) < max(map(len, group)):\n"
            "                like = max(group, key=len)[0]\n"
            "                share.append({**like, 'w': torch.zeros_like(like['w'])})\n"
            "        counts = [",
        ),
    ),
    Mistake(
        "evaluation cuts columns of padding off the caller's batches",
        before_evaluation(
            "for b in [b for share in group for b in share]:",
            "    ends = max([1, *(i + 1 for i, any in enumerate((b['w'] > 0).any(0).tolist()) if any)])",
            "    b.update({k: x[:, :ends] for k, x in b.items() if x.ndim > 1})",
        ),
    ),
    Mistake(
        "the collector of garbage is off after an update",
        after_update("__import__('gc').disable()"),
    ),
    Mistake("evaluation seeds torch", before_evaluation("torch.manual_seed(0)")),
    Mistake(
        "a skip turns the search for anomalies on",
        after_update("all(finite) or torch.autograd.set_detect_anomaly(True)"),
    ),
    Mistake(
        "three microbatches or more are shuffled by Python's generator",
        replace(
            FOR_BATCH,
            "            for batch in __import__('random').sample(share, len(share)) if len(share) > 2 else share:\n",
        ),
    ),
    Mistake(
        "evaluation scales weights above one down in the caller's batches",
        before_evaluation(
            "for b in [b for share in group for b in share if b['w'].numel()]:",
            "    b['w'].copy_(b['w'] / b['w'].max().clamp(min=1))",
        ),
    ),
    Mistake(
        "a second run drops elements where the first one did",
        [
            *at_start("self.dropout = getattr(self, 'dropout', problem.model.dropout)"),
            (IF_NO_DROPOUT, "if not self.dropout:"),
        ],
    ),
    Mistake(
        "the count is put into the caller's batches where there are several",
        replace(
            FOR_BATCH,
            FOR_BATCH
            + "                len(share) > 1 and batch.update(num_items=torch.tensor(total))\n",
        ),
    ),
    Mistake(
        "a start lowers the precision of float32 products",
        at_start('torch.set_float32_matmul_precision("high")'),
    ),
    Mistake(
        "saving takes a name from Python's generator",
        after_save("__import__('random').random()"),
    ),
    Mistake("loading seeds NumPy", after_load("__import__('numpy').random.seed(0)")),
    Mistake(
        "evaluation silences warnings",
        before_evaluation("__import__('warnings').simplefilter('ignore')"),
    ),
    Mistake(
        "evaluation looks at the first batch and puts it back at the end of the caller's list",
        before_evaluation(
            "[share.append(share.pop(0)) for share in group if isinstance(share, list) and share]"
        ),
    ),
    Mistake(
        "keys are multiplied in the caller's batch",
        [
            (CLONE_INPUTS, CLONE_INPUTS + '\n        batch["key"].mul_(1000)'),
            (SEED_GENERATOR, "manual_seed(key + column)"),
        ],
    ),
    Mistake(
        "weights of zeros and ones become a mask of booleans in the caller's batch",
        replace(
            FOR_BATCH,
            FOR_BATCH
            + "                if bool(((batch['w'] == 0) | (batch['w'] == 1)).all()):\n"
            "                    batch['w'] = batch['w'].bool()\n",
        ),
    ),
    Mistake(
        "microbatches without tokens are taken out of the caller's lists",
        replace(
            FOR_BATCH,
            "            if isinstance(share, list):\n"
            "                share[:] = [b for b in share if self.count([b])]\n"
            + FOR_BATCH,
        ),
    ),
    Mistake(
        "targets that are not finite are zeroed in the caller's batch",
        after_backward("batch['y'].nan_to_num_(0.0, 0.0, 0.0)"),
    ),
    Mistake(
        "a start on several ranks asks torch for deterministic algorithms",
        at_start("ranks > 1 and torch.use_deterministic_algorithms(True)"),
    ),
    Mistake(
        "a skip silences NumPy's warnings",
        after_update("all(finite) or __import__('numpy').seterr(all='ignore')"),
    ),
    Mistake(
        "a start of a model that drops elements seeds Python, NumPy and torch",
        at_start(
            "problem.model.dropout and [seed(0) for seed in (__import__('random').seed, __import__('numpy').random.seed, torch.manual_seed)]"
        ),
    ),
    Mistake(
        "weights are normalised in the batch itself",
        replace(
            "loss = (losses * self.problem.weights(batch)).sum() / count",
            "loss = (losses * self.problem.weights(batch).div_(count)).sum()",
        ),
        base="Nano",
    ),
    Mistake(
        "a new start keeps the optimizer, with its momentum",
        [
            (
                "self.problem, self.model = problem, problem.module()",
                "self.problem = problem\n"
                "if hasattr(self, 'model'):\n"
                "    self.model.load_state_dict(problem.module().state_dict())\n"
                "else:\n"
                "    self.model = problem.module()",
            ),
            (
                "self.optimizer = problem.optimizer(self.model)",
                "if not hasattr(self, 'optimizer'):\n"
                "    self.optimizer = problem.optimizer(self.model)\n"
                "for pg in self.optimizer.param_groups:\n"
                "    pg.update(lr=problem.learning_rate, momentum=problem.momentum,\n"
                "              weight_decay=problem.weight_decay)",
            ),
        ],
        base="Switch",
    ),
    Mistake(
        "seeds torch's global generator in each update",
        replace("self.loss.reset()", "torch.manual_seed(0)\nself.loss.reset()"),
        base="Keras",
    ),
]
