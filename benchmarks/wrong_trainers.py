"""Sixty mistakes in these trainers, written without a look at what the kit draws.

    python -m benchmarks.wrong_trainers

Each edits the text of one of ``right_trainers``. It prints the first law that finds each.
"""

import functools
import inspect
import textwrap
import time
from collections.abc import Callable
from typing import Any

import torch

import purestep as ps
from benchmarks import right_trainers as right

WRONG: list[tuple[str, Callable[[], Any]]] = []
"""What each is, and what makes it."""


def build(base: str, edits: tuple[tuple[str, str], ...]) -> Any:
    """The class or function of this name, edited: pieces of a line, or lines at their depth."""
    source = inspect.getsource(getattr(right, base))
    for old, new in edits:
        old, new = textwrap.dedent(old).strip("\n"), textwrap.dedent(new).strip("\n")
        if source.count(old) == 1:
            at = source.index(old)
            line = source[source.rfind("\n", 0, at) + 1 : at]
            pad = line if not line.strip() else " " * (len(line) - len(line.lstrip()))
            source = source.replace(old, new.replace("\n", "\n" + pad))
            continue
        for depth in range(4, 24, 4):
            lines = textwrap.indent(old, " " * depth)
            if source.count(lines) == 1:
                source = source.replace(lines, textwrap.indent(new, " " * depth))
                break
        else:
            raise ValueError(f"{base}: {source.count(old)} times: {old}")
    names = dict(vars(right))
    exec(compile(source, f"<{base}>", "exec"), names)
    return names[base]


def wrong(name: str, base: str, *edits: tuple[str, str]) -> None:
    """One more mistake."""
    made = build(base, edits)
    loop = base == "divide_once"
    WRONG.append((name, functools.partial(ps.testing.loop, made) if loop else made))


# Windows and accumulation
wrong(
    "accumulation: mean of the microbatches' means",
    "Nano",
    (
        "loss = (losses * self.problem.weights(batch)).sum() / count",
        "weights = self.problem.weights(batch)\n"
        "loss = (losses * weights).sum() / weights.sum().clamp(min=1e-9) / len(microbatches)",
    ),
)
wrong(
    "accumulation: zero_grad inside the loop, the last microbatch alone counts",
    "Nano",
    ("self.optimizer.zero_grad(set_to_none=True)\n", ""),
    ("loss.backward()", "self.optimizer.zero_grad(set_to_none=True)\nloss.backward()"),
)
wrong(
    "accumulation: divided by the count of the last microbatch",
    "divide_once",
    ("count + tokens", "tokens"),
)
wrong(
    "accumulation: breaks at a microbatch without tokens",
    "divide_once",
    ("continue", "break"),
)
wrong(
    "accumulation: windows of two, an odd last microbatch is dropped",
    "Manual",
    ("count = sum(", "flat = flat[: len(flat) // 2 * 2] or flat\ncount = sum("),
)
wrong(
    "accumulation: synchronises and steps at each second microbatch, the rest stays for later",
    "Lockstep",
    ("step == steps - 1", "(step + 1) % 2 == 0"),
)
wrong(
    "accumulation: the last microbatch is read twice (prefetch)",
    "Keras",
    (
        "for batch in group[0]:\n            self.train_on",
        "for batch in [*group[0], *group[0][-1:]]:\n    self.train_on",
    ),
)
wrong(
    "accumulation: steps after each microbatch",
    "Manual",
    (
        "for name, g in zip(\n"
        "    params, torch.autograd.grad(loss, list(params.values())), strict=False\n"
        "):\n"
        "    gradient[name] += g / count",
        "grads = torch.autograd.grad(loss, list(params.values()))\n"
        "self.step({name: g / count for name, g in zip(params, grads)})",
    ),
    ("    self.step(gradient)\n", "    pass\n"),
)
wrong(
    "accumulation: the count of the first update is kept for all",
    "Switch",
    ("self.metrics = {}", "self.metrics, self.count = {}, None"),
    (
        "self.optimizer.zero_grad()",
        "self.count = count = self.count or count\nself.optimizer.zero_grad()",
    ),
)
wrong(
    "accumulation: only the first accumulator is zeroed between updates",
    "Keras",
    (
        "for accumulator in self.accumulators:",
        "for accumulator in self.accumulators[:1]:",
    ),
)

# Ranks
wrong(
    "ranks: mean of the ranks' means",
    "Ddp",
    (
        "total = torch.stack([p.grad for p in replicas]).sum(0)",
        "means = [p.grad / max(c, 1e-9) for p, c in zip(replicas, counts)]\n"
        "total = torch.stack(means).mean(0) * count",
    ),
)
wrong(
    "ranks: gradients are averaged, the loss is not multiplied by the ranks",
    "Transformers",
    ("(loss * self.world).backward()", "loss.backward()"),
)
wrong(
    "ranks: psum of gradients, pmean of counts",
    "Optax",
    (
        "grads = {k: sum(g[k] for g, _, _ in parts) / count for k in params}",
        "mean_count = count / len(parts)\n"
        "grads = {k: sum(g[k] for g, _, _ in parts) / mean_count for k in params}",
    ),
)
wrong(
    "ranks: only the first parameter is reduced",
    "Ddp",
    (
        "for replicas in zip(*(model.parameters() for model in self.models), strict=False):",
        "for index, replicas in enumerate(zip(*(m.parameters() for m in self.models))):",
    ),
    ("p.grad = total / count", "p.grad = (p.grad if index else total) / count"),
)
wrong(
    "ranks: a rank without microbatches does not step",
    "Ddp",
    ("norm = torch.cat", "if not group[rank]:\n    continue\nnorm = torch.cat"),
)
wrong(
    "ranks: no_sync, only the last microbatch's gradient is reduced",
    "Lockstep",
    (
        "for step in range(steps):",
        "kept = {}\nfor step in range(steps):\n"
        "    if step == steps - 1 and step:\n"
        "        kept = {p: p.grad for m in self.models for p in m.parameters()}\n"
        "        for optimizer in self.optimizers:\n"
        "            optimizer.zero_grad()",
    ),
    (
        "self.all_reduce()\n",
        "self.all_reduce()\nfor p, g in kept.items():\n    p.grad += g\n",
    ),
)
wrong(
    "ranks: rank 0's gradient is broadcast where it should be reduced",
    "Adam",
    ("p.grad = sum(parts) / count", "p.grad = parts[0] / count"),
)
wrong(
    "ranks: gradients are reduced in bfloat16",
    "Ddp",
    (
        "torch.stack([p.grad for p in replicas]).sum(0)",
        "torch.stack([p.grad.bfloat16() for p in replicas]).sum(0).to(replicas[0].dtype)",
    ),
)
wrong(
    "ranks: stops at the rank with fewest microbatches",
    "Joined",
    (
        "ranks = [",
        "fewest = min(len(microbatches) for microbatches in group)\n"
        "group = [microbatches[:fewest] for microbatches in group]\nranks = [",
    ),
)
wrong(
    "ranks: sharded twice, each rank takes its stride of what it already holds",
    "Manual",
    (
        "flat = [batch for microbatches in group for batch in microbatches]",
        "flat = [b for r, microbatches in enumerate(group) for b in microbatches[r :: self.ranks]]",
    ),
)

# Tokens, weights, padding
wrong(
    "tokens: padding counts in the denominator",
    "Masked",
    ("return int(self.mask(batch).sum())", "return self.mask(batch).numel()"),
)
wrong(
    "tokens: num_items counts the labels before they are shifted",
    "Transformers",
    ('batch["labels"][:, 1:] != -100', 'batch["labels"] != -100'),
)
wrong(
    "tokens: labels are shifted twice",
    "Transformers",
    ("logits[:, :-1, :]", "logits[:, :-2, :]"),
    ('inputs["labels"][:, 1:]', 'inputs["labels"][:, 2:]'),
)
wrong(
    "tokens: tokens of any weight count as one in the denominator",
    "Nano",
    (
        "float(self.problem.weights(batch).sum())",
        "float((self.problem.weights(batch) > 0).sum())",
    ),
)
wrong(
    "tokens: the count is at least 1",
    "Nano",
    ("        lossf = 0.0", "        count = max(count, 1.0)\n        lossf = 0.0"),
)
wrong(
    "tokens: the count has an epsilon of 1e-6",
    "Ddp",
    ("p.grad = total / count", "p.grad = total / (count + 1e-6)"),
)
wrong(
    "tokens: padding of collation has weight one",
    "Joined",
    ('fill = {"w": 0}', 'fill = {"w": 1}'),
)
wrong(
    "tokens: rows are cut or padded to the length of the first batch seen",
    "Joined",
    (
        "self.report = (None, None, None)",
        "self.report, self.length = (None, None, None), 0",
    ),
    (
        'length = max(batch["w"].shape[1] for batch in microbatches)',
        'self.length = self.length or max(batch["w"].shape[1] for batch in microbatches)\n'
        "length = self.length",
    ),
    ("value = batch[key]", "value = batch[key][:, :length]"),
)
wrong(
    "tokens: the mean of each row, then of the rows",
    "Manual",
    (
        "return (self.problem.losses(call, batch) * self.problem.weights(batch)).sum()",
        "w = self.problem.weights(batch)\n"
        "return ((self.problem.losses(call, batch) * w).sum(1) / w.sum(1).clamp(min=1e-9)).sum()",
    ),
    (
        "self.problem.weights(batch).sum().item()",
        "(self.problem.weights(batch).sum(1) > 0).sum().item()",
    ),
)
wrong(
    "tokens: whole weights are taken as a mask",
    "Keras",
    (
        "weights = self.problem.weights(batch)\n",
        "weights = (self.problem.weights(batch) > 0).to(self.variables[0].dtype)\n",
    ),
)

# Optimizer, clipping, skips
wrong(
    "clipping: each microbatch's gradient is clipped",
    "Clip",
    ("zip(local, grads,", "zip(local, self.clip(grads)[0],"),
)
wrong(
    "clipping: the sum is clipped before it is divided by the count",
    "Clip",
    (
        "clipped, norm = self.clip(total)",
        "clipped, norm = self.clip([g * count for g in total])\n"
        "clipped, norm = [g / count for g in clipped], norm / count",
    ),
)
wrong(
    "clipping: each rank clips its own before they are reduced",
    "Clip",
    ("parts.append(local)", "parts.append(self.clip(local)[0])"),
)
wrong(
    "skips: only the first rank's gradient is asked whether it is finite",
    "Clip",
    ("for g in total):", "for g in parts[0]):"),
)
wrong(
    "skips: the parameters are put back, but the momentum has seen the step",
    "Clip",
    (
        "if not all(bool(torch.isfinite(g).all()) for g in total):\n            return",
        "kept = [p.detach().clone() for p in self.params]",
    ),
    (
        "self.optimizer.step()",
        "self.optimizer.step()\n"
        "if not all(bool(torch.isfinite(g).all()) for g in total):\n"
        "    with torch.no_grad():\n"
        "        for p, old in zip(self.params, kept):\n"
        "            p.copy_(old)\n"
        "    return",
    ),
)
wrong(
    "optimizer: the schedule goes on with each microbatch",
    "Adam",
    (
        "self.schedule.step()",
        "for _ in range(sum(map(len, group))):\n    self.schedule.step()",
    ),
)
wrong(
    "optimizer: the schedule goes on in an update without tokens",
    "Adam",
    (
        "if count == 0:\n            return",
        "if count == 0:\n    self.schedule.step()\n    return",
    ),
)
wrong(
    "optimizer: weight decay is added for each microbatch",
    "Manual",
    (
        "gradient[name] += g / count",
        "gradient[name] += g / count + self.problem.weight_decay * self.params[name]",
    ),
    ("g = gradient[name] + decay * p", "g = gradient[name]"),
)
wrong(
    "optimizer: weight decay is decoupled from the momentum",
    "Manual",
    ("g = gradient[name] + decay * p", "g = gradient[name]"),
    ("p - rate * self.velocity[name]", "p - rate * (self.velocity[name] + decay * p)"),
)
wrong(
    "optimizer: steps on zeroed gradients in an update without tokens",
    "divide_once",
    ("optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)"),
    ("    if count == 0:\n        return None\n", ""),
    ("p.grad.div_(count)", "if p.grad is not None and count:\n    p.grad.div_(count)"),
    (
        'return {"loss": loss_sum / count}',
        'return {"loss": loss_sum / count} if count else None',
    ),
)

# Evaluation and metrics
wrong(
    "evaluation: mean of the microbatches' means",
    "Keras",
    (
        "metric.add(self.problem.losses(self.model, batch), self.problem.weights(batch))",
        "one = Mean()\n"
        "one.add(self.problem.losses(self.model, batch), self.problem.weights(batch))\n"
        "if one.count:\n"
        "    metric.total, metric.count = metric.total + one.result(), metric.count + 1",
    ),
)
wrong(
    "evaluation: only rank 0's rows",
    "Optax",
    (
        "for microbatches in group:\n            for batch in microbatches:\n                s, c",
        "for microbatches in group[:1]:\n    for batch in microbatches:\n        s, c",
    ),
)
wrong(
    "evaluation: the last microbatch is dropped where there are several",
    "Transformers",
    (
        "for inputs in microbatches:\n                total",
        "for inputs in microbatches[:-1] or microbatches:\n    total",
    ),
)
wrong(
    "evaluation: ignored tokens count, weights do not",
    "Evaluator",
    (
        "total + (losses * weights).sum(), count + weights.sum()",
        "total + losses.sum(), count + torch.tensor(losses.numel())",
    ),
)
wrong(
    "metrics: the loss is the last microbatch's share",
    "Nano",
    ("lossf += loss.item()", "lossf = loss.item()"),
)
wrong(
    "metrics: loss and tokens are not reset between updates",
    "Keras",
    (
        "self.loss, self.logs = Mean(), {}",
        "self.loss, self.logs, self.epoch = Mean(), {}, Mean()",
    ),
    (
        "self.loss.add(losses.detach(), weights)",
        "self.loss.add(losses.detach(), weights)\nself.epoch.add(losses.detach(), weights)",
    ),
    (
        '{"loss": self.loss.result(), "num_tokens": self.loss.count}',
        '{"loss": self.epoch.result(), "num_tokens": self.epoch.count}',
    ),
)
wrong(
    "metrics: the norm is that of the rank's own gradient",
    "Ddp",
    (
        "for replicas in zip(*",
        "own = [torch.cat([p.grad.flatten() / count for p in m.parameters()]).norm()\n"
        "       for m in self.models]\nfor replicas in zip(*",
    ),
    ("norm.item()", "own[rank].item()"),
)
wrong(
    "metrics: the norm is the sum of the parameters' norms",
    "Switch",
    (
        "squares = sum(p.grad.square().sum() for p in self.model.parameters())",
        "norm = sum(p.grad.norm() for p in self.model.parameters())",
    ),
    ("squares.sqrt()", "norm"),
)
wrong(
    "metrics: the loss is the mean of the ranks' means",
    "Optax",
    (
        "loss = sum(s for _, s, _ in parts) / count",
        "loss = sum(s / c.clamp(min=1e-9) for _, s, c in parts) / len(parts)",
    ),
)
wrong(
    "metrics: the loss is computed anew after the step",
    "divide_once",
    (
        'return {"loss": loss_sum / count}',
        "with torch.no_grad():\n"
        "    new = sum((problem.losses(model, b) * problem.weights(b)).sum() for b in microbatches)\n"
        'return {"loss": new / count}',
    ),
)

# Saving, resuming, state, noise
wrong(
    "resume: the optimizer is not loaded",
    "Nano",
    ('self.optimizer.load_state_dict(saved["optimizer"])\n', ""),
)
wrong(
    "resume: saved by reference, and a new start resets the same modules in place",
    "Transformers",
    (
        "self.models = [problem.module() for _ in range(ranks)]",
        "if len(getattr(self, 'models', ())) != ranks:\n"
        "    self.models = [problem.module() for _ in range(ranks)]\n"
        "for model in self.models:\n"
        "    model.load_state_dict(problem.module().state_dict())",
    ),
    (
        "copy.deepcopy([self.models[0].state_dict(), self.optimizers[0].state_dict()])",
        "[self.models[0].state_dict(), self.optimizers[0].state_dict()]",
    ),
)
wrong(
    "resume: the schedule begins anew",
    "Adam",
    (
        'self.schedule.load_state_dict(state["schedule"])',
        'for group in self.optimizer.param_groups:\n    group["lr"] = group["initial_lr"]',
    ),
)
wrong(
    "resume: the checkpoint has parameters in bfloat16",
    "Optax",
    (
        "return self.state\n",
        "return self.state._replace(params={k: v.bfloat16() for k, v in self.state.params.items()})\n",
    ),
    (
        "self.state = saved",
        "params = {k: v.to(self.state.params[k].dtype) for k, v in saved.params.items()}\n"
        "self.state = saved._replace(params=params)",
    ),
)
wrong(
    "resume: only rank 0 loads",
    "Ddp",
    ("for rank in range(self.world):", "for rank in range(1):"),
)
wrong(
    "noise: seeded by the place of the row in its microbatch",
    "Evaluator",
    (
        'torch.manual_seed(1000 + int(one["key"]))',
        "torch.manual_seed(1000 + 100 * index + row)",
    ),
)
wrong(
    "noise: seeded by key and rank",
    "Evaluator",
    (
        'torch.manual_seed(1000 + int(one["key"]))',
        'torch.manual_seed(1000 * (1 + rank) + int(one["key"]))',
    ),
)
wrong(
    "state: weights are normalised in the batch itself",
    "Nano",
    (
        "loss = (losses * self.problem.weights(batch)).sum() / count",
        "loss = (losses * self.problem.weights(batch).div_(count)).sum()",
    ),
)
wrong(
    "state: a new start keeps the optimizer, with its momentum",
    "Switch",
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
)
wrong(
    "state: seeds torch's global generator in each update",
    "Keras",
    ("self.loss.reset()", "torch.manual_seed(0)\nself.loss.reset()"),
)

assert len(WRONG) == 60 == len({name for name, _ in WRONG})


def main() -> None:
    """Prints which law finds each first, and after how many seconds."""
    torch.set_num_threads(1)
    for number, (name, make) in enumerate(WRONG):
        start, found = time.process_time(), "NOT FOUND"
        for law in ps.testing.LAWS:
            (verdict,) = ps.testing.judge(make(), [law])
            if verdict.finding == "wrong":
                found = law
                break
        print(
            f"{number:2} {name:88} {time.process_time() - start:4.1f} s  {found}",
            flush=True,
        )


if __name__ == "__main__":
    main()
