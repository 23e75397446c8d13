"""``make_backward``: the gradients of the equation in ``.grad``, and nothing else."""

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import purestep as ps
from support.ranks import Run
from support.torch_private import fail_in_backward_compiler

WIDTH = 3


class Model(nn.Module):
    """Has a frozen layer, one that no loss reaches, and, if wanted, a norm whose buffers it writes."""

    def __init__(self, *, has_norm: bool = False) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if has_norm else nn.Identity()
        self.unused = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.layer(self.frozen(x).tanh())).sin()
        return y.sum(-1)


def make_model(*, dtype: torch.dtype = torch.float64, has_norm: bool = False) -> Model:
    """Makes equal models at each call, on threads too, which share torch's generator."""
    model = Model(has_norm=has_norm)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


def make_group(
    sizes: Sequence[int], dtype: torch.dtype = torch.float64
) -> list[dict[str, Tensor]]:
    """Makes microbatches of rows, of which some do not count."""
    generator = torch.Generator().manual_seed(len(sizes))
    group = []
    for size in sizes:
        x = torch.randn(size, WIDTH, generator=generator, dtype=dtype)
        labels = torch.randint(-100, 3, (size,), generator=generator)
        labels[0] = 1
        group.append({"x": x, "labels": labels.clamp(min=-1).where(labels > -1, -100)})
    return group


def loss_fn(model: Any, microbatch: Any) -> Tensor:
    return (model(microbatch["x"]) - 1).square()


def compute_loss(model: nn.Module, group: Any) -> Tensor:
    """Computes the loss of a group as a loop by hand does: a sum over the tokens, divided once."""
    num_tokens = sum((part["labels"] != -100).sum() for part in group)
    total = torch.zeros((), dtype=torch.float64)
    for part in group:
        losses = loss_fn(model, part)[part["labels"] != -100]
        total = total + losses.double().sum() / num_tokens
    return total


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize(
    "compiler", [False, partial(torch.compile, backend="eager")], ids=["", "compiled"]
)
def test_gradients_are_those_of_the_equation(normalize: Any, compiler: Any) -> None:
    model = make_model()
    group = make_group([4, 1, 7])
    expected = deepcopy(model)
    compute_loss(expected, group).backward()
    parameters = dict(model.named_parameters())
    before = deepcopy(model.state_dict())
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)  # of the update before

    backward = ps.make_backward(model, loss_fn, normalize=normalize, compile=compiler)
    for _ in range(2):
        metrics = backward(group)

        for name, grad in gradients(model).items():
            wanted = dict(expected.named_parameters())[name].grad
            if name.startswith("frozen"):
                continue
            assert grad is not None
            if wanted is None:  # by hand; zero is its derivative
                wanted = torch.zeros_like(grad)
            torch.testing.assert_close(grad, wanted, rtol=1e-13, atol=1e-15)
        torch.testing.assert_close(metrics.loss, compute_loss(model, group).detach())
    assert metrics.num_tokens == sum((part["labels"] != -100).sum() for part in group)
    trained = [p.grad for p in parameters.values() if p.requires_grad]
    torch.testing.assert_close(metrics.grad_norm, ps.tree.global_norm(trained))
    assert model.frozen.weight.grad is None, "an optimizer would move it"
    assert dict(model.named_parameters()).items() == parameters.items()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_group_without_tokens_has_gradients_of_zero() -> None:
    model = make_model()
    group = make_group([3])
    group[0]["labels"].fill_(-100)
    for microbatches in (group, []):
        metrics = ps.make_backward(model, loss_fn)(microbatches)
        assert not metrics.applied
        assert metrics.loss == 0
        assert model.layer.weight.grad is not None
        assert not model.layer.weight.grad.any()


def test_buffers_are_written_as_in_any_loop() -> None:
    model = make_model(has_norm=True)
    by_hand = deepcopy(model)
    group = make_group([4, 2])
    compute_loss(by_hand, group).backward()
    ps.make_backward(model, loss_fn)(group)
    assert model.norm.num_batches_tracked == 2
    for ours, theirs in zip(model.buffers(), by_hand.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_half_precision_is_summed_in_float32_and_rounded_once() -> None:
    model = make_model(dtype=torch.bfloat16)
    group = make_group([2] * 64, torch.bfloat16)
    sums: dict[str, Tensor] = {}
    for part in group:
        num_tokens = sum((other["labels"] != -100).sum() for other in group)
        weights = (part["labels"] != -100) / num_tokens
        model.zero_grad()
        loss_fn(model, part).float().backward(weights.float())
        for name, grad in gradients(model).items():
            if grad is not None:
                sums[name] = sums.get(name, torch.zeros(())) + grad.float()
    ps.make_backward(model, loss_fn)(group)
    for name, total in sums.items():
        grad = gradients(model)[name]
        assert grad is not None
        assert grad.dtype == torch.bfloat16
        error = (grad.float() - total).abs().max()
        # One rounding to 8 bits; each sum of 64 numbers in bfloat16 would round 64 times.
        assert error <= 2**-8 * total.abs().max()
    for parameter in model.parameters():
        assert parameter.grad_dtype == torch.bfloat16


def test_a_parameter_with_a_narrow_grad_dtype_has_wide_sums() -> None:
    """As one of bfloat16 has: each sum is rounded once."""
    group = make_group([4] * 40, torch.float32)
    expected = make_model(dtype=torch.float32)
    ps.make_backward(expected, loss_fn)(group)
    model = make_model(dtype=torch.float32)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.bfloat16

    ps.make_backward(model, loss_fn)(group)

    for name, grad in gradients(model).items():
        wanted = gradients(expected)[name]
        if grad is not None and wanted is not None:
            error = (grad.float() - wanted).abs().max()
            assert error <= 2**-8 * wanted.abs().max()


class ReturnsParam(torch.autograd.Function):
    """Returns w itself as the gradient, whatever the cotangent is."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return w.square().sum().view(1) / 2

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        (w,) = ctx.saved_tensors
        return w.detach()


def test_a_gradient_in_the_memory_of_a_parameter_is_copied() -> None:
    layer = nn.Linear(2, 1, bias=False)
    apply: Any = ReturnsParam.apply
    backward = ps.make_backward(
        layer, lambda m, _: apply(m.weight), weight_fn=torch.ones_like
    )
    before = layer.weight.detach().clone()
    for _ in range(2):
        backward([torch.ones(1)] * 3)
        assert layer.weight.grad is not None
        torch.testing.assert_close(layer.weight.grad, 3 * before)
        assert layer.weight.grad.data_ptr() != layer.weight.data_ptr()
    assert torch.equal(layer.weight, before)


def test_a_parameter_as_a_loss_where_the_backward_pass_is_not_compiled() -> None:
    """The second microbatch has another size; its backward pass runs again, and adds once."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.temperature = nn.Parameter(torch.ones(()))

    def scaled_loss(model: Any, x: Tensor) -> Any:
        losses = (x * model.weight).sum(1)
        return ps.LossOutput(losses, microbatch_loss=model.temperature)

    model = Scaled()
    backward = ps.make_backward(
        model,
        scaled_loss,
        weight_fn=lambda x: x[:, 0],
        compile=partial(torch.compile, backend=fail_in_backward_compiler(after=1)),
    )
    with pytest.warns(UserWarning, match="cannot make one graph"):
        backward([torch.ones(rows, 2) for rows in (3, 4, 5)])
    assert model.temperature.grad == 1
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [1, 1]


def test_a_loss_that_fails_leaves_no_gradient() -> None:
    model = make_model(dtype=torch.bfloat16)
    group = make_group([3, 2, 4], torch.bfloat16)

    def failing(model: Any, microbatch: Any) -> Tensor:
        if len(microbatch["x"]) == 4:
            raise ValueError("no data")
        return loss_fn(model, microbatch)

    with pytest.raises(ValueError, match="no data"):
        ps.make_backward(model, failing)(group)
    for parameter in model.parameters():
        assert parameter.grad is None
        assert parameter.grad_dtype == torch.bfloat16


def test_a_parameter_that_is_frozen_between_two_calls_stays() -> None:
    """An optimizer updates every parameter that has a gradient, an old one too."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward = ps.make_backward(model, loss_fn)
    backward(make_group([3]))
    optimizer.step()
    frozen = model.layer.weight
    frozen.requires_grad_(False)
    before = frozen.clone()
    metrics = backward(make_group([3]))
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    optimizer.step()
    assert frozen.grad is None
    assert torch.equal(frozen, before)
    torch.testing.assert_close(norm, metrics.grad_norm)


def test_a_scaler_takes_the_same_steps() -> None:
    """A scale that is a power of two changes no bit."""
    results = []
    for is_scaled in (False, True):
        model = make_model(dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cpu", enabled=is_scaled)

        def scaled_loss(model: Any, microbatch: Any, scaler: Any = scaler) -> Any:
            return scaler.scale(loss_fn(model, microbatch))

        backward = ps.make_backward(model, scaled_loss)
        for sizes in ([3, 1], [2, 5, 1]):
            backward(make_group(sizes, torch.float32))
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        results.append(model.state_dict())
    plain, scaled = results
    for name in plain:
        assert torch.equal(plain[name], scaled[name])


class Checkpointed(Model):
    """Computes its layers again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


def test_modules_run_as_they_are() -> None:
    """With checkpoints, with hooks, and compiled by torch."""
    expected = make_model()
    group = make_group([4, 2])
    backward = ps.make_backward(expected, loss_fn)
    backward(group)
    calls: list[Any] = []
    checkpointed = Checkpointed().double()
    checkpointed.load_state_dict(expected.state_dict())
    hooked = deepcopy(expected)
    hooked.layer.register_forward_hook(lambda *args: calls.append(args))
    compiled = deepcopy(expected)
    compiled.compile(backend="eager")
    for model in (checkpointed, hooked, compiled):
        ps.make_backward(model, loss_fn)(group)
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            if theirs.requires_grad:
                torch.testing.assert_close(ours.grad, theirs.grad)
    assert len(calls) == len(group)


def backward_on_rank(axis: ps.Axis, group: Any) -> Any:
    """Returns the gradients of a rank, twice: buckets are made at the first call."""
    model = make_model()
    backward = ps.make_backward(model, loss_fn, axis=axis)
    for _ in range(2):
        metrics = backward(group)
    grads = {name: grad for name, grad in gradients(model).items() if grad is not None}
    model.zero_grad()
    compute_loss(model, make_group([2])).backward()
    assert model.layer.weight.grad is not None
    return grads, metrics.loss, model.layer.weight.grad


@pytest.mark.parametrize("bucket_bytes", [8, 1 << 20])
def test_ranks_have_the_gradients_of_one(ranks: Run, bucket_bytes: int) -> None:
    sizes = [[4, 1], [7], [], [2, 2, 3]]
    groups = [make_group(of_rank) for of_rank in sizes]
    everything = [part for group in groups for part in group]
    expected, loss, by_hand = backward_on_rank(ps.LocalAxis(), everything)
    for grads, loss_on_rank, later_by_hand in ranks(
        backward_on_rank, groups, bucket_bytes=bucket_bytes
    ):
        torch.testing.assert_close(grads, expected, rtol=1e-13, atol=1e-15)
        torch.testing.assert_close(loss_on_rank, loss)
        assert torch.equal(later_by_hand, by_hand), "a hook stays behind"


class FullyShardedDataParallel(nn.Linear):
    """Stands for torch's class, which takes processes to make."""


class Sharded(FullyShardedDataParallel):
    """Has another name."""


REFUSED = [
    (lambda: {"w": torch.ones(1)}, TypeError, "ps.make_update_step"),
    (
        lambda: nn.Sequential(FullyShardedDataParallel(1, 1)),
        TypeError,
        r"0 is sharded by .*ps\.from_module",
    ),
    (
        lambda: Sharded(1, 1),
        TypeError,
        r"model is sharded by Sharded",
    ),
]


@pytest.mark.parametrize(("make", "error", "pattern"), REFUSED)
def test_what_it_does_not_take(make: Any, error: Any, pattern: str) -> None:
    with pytest.raises(error, match=pattern):
        ps.make_backward(make(), loss_fn)


def wrap_in_torchs_parallel(axis: ps.Axis) -> str:
    """Returns what is said of a module in DistributedDataParallel."""
    wrapped = nn.parallel.DistributedDataParallel(make_model())
    try:
        ps.make_backward(wrapped, loss_fn)
    except TypeError as error:
        return str(error)
    return ""


def test_a_module_that_reduces_by_itself_is_refused(processes: Run) -> None:
    for text in processes(wrap_in_torchs_parallel):
        assert "DistributedDataParallel" in text
        assert "axis=ps.MeshAxis" in text


def test_nothing_to_train_and_data_with_a_graph_are_refused() -> None:
    model = make_model().requires_grad_(False)
    with pytest.raises(ValueError, match=r"requires_grad_\(\)"):
        ps.make_backward(model, loss_fn)(make_group([1]))
    model.requires_grad_(True)
    (microbatch,) = make_group([2])
    microbatch["x"] = microbatch["x"].clone().requires_grad_() * 2
    with pytest.raises(ValueError, match="Detach the data"):
        ps.make_backward(model, loss_fn)([microbatch])


def test_params_that_no_step_takes_are_refused() -> None:
    model = nn.Linear(WIDTH, 1, dtype=torch.complex64)
    with pytest.raises(TypeError, match=r"is torch\.complex64"):
        ps.make_backward(model, loss_fn)(make_group([1]))


def mean_loss(model: Any, microbatch: Any) -> Tensor:
    return functional.mse_loss(model(microbatch["x"]), microbatch["x"][:, 0])


def test_a_mean_is_refused() -> None:
    with pytest.raises(ValueError, match='reduction="none"'):
        ps.make_backward(make_model(), mean_loss)(make_group([2]))


@pytest.mark.parametrize("sizes", [[], [4]])
def test_a_call_that_something_records_is_refused(sizes: list[int]) -> None:
    """Leaves no wrapped gradient behind, also if there is no microbatch."""
    model = make_model()
    group = make_group(sizes)
    backward = ps.make_backward(model, loss_fn)

    def recorded(x: Tensor) -> Tensor:
        backward(group)
        return x.sum()

    compiled = torch.compile(recorded, backend="eager")
    around = [torch.func.grad(recorded), torch.vmap(recorded), compiled]
    for call in around:
        with pytest.raises(ValueError, match="where nothing records"):
            call(torch.ones(2))
        assert not any(gradients(model).values())
