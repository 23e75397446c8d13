"""Tests modules whose parameters are DTensors: torch's plans and Hugging Face's, over dp as well, and what is refused.

Each plan takes three updates on two ranks of dp and two of tp, of which the second is skipped, against one process.
"""

import inspect
import math
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import init_empty_weights
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

import purestep as ps
from purestep import tree
from purestep.testing.processes import World
from support.torch_private import resolve_tp_plan
from support.worlds import Grid, Ranks, on_processes
from tests import model_families
from tests.model_families import is_block

pytestmark = pytest.mark.timeout(60)

OPTIMIZER = ps.optim.chain(ps.optim.clip_by_global_norm(0.5), ps.optim.adamw(0.01))
MAX_DISTANCE = 1e-12
SKIPPED = 1
"""The update in which the gradient of one text is not finite."""
GRID = Ranks(4, rows=2)


# Models and their plans


class Case(NamedTuple):
    """A model, how it is parallelized over a mesh, and its loss if that is not the usual one."""

    make: Callable[[], Any]
    parallelize: Callable[[Any, Any], None]
    make_loss: Callable[..., Any] | None = None


def make_llama(**config: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config.setdefault("num_key_value_heads", 2)
        model = model_families.build_model("LlamaForCausalLM", **config)
    return model.to(torch.float64)


def make_qwen() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config: Any = {"num_key_value_heads": 2, "head_dim": 8}
        model = model_families.build_model("Qwen3ForCausalLM", **config)
    return model_families.with_large_weights(model)


def make_tied_qwen() -> Any:
    """Makes a Qwen 2, whose queries, keys and values have biases, not zero."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config: Any = {"num_key_value_heads": 2, "tie_word_embeddings": True}
        model = model_families.build_model("Qwen2ForCausalLM", **config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
    return model.to(torch.float64)


BLOCK_PLAN: dict[str, Any] = {
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


def parallelize(
    model: Any, mesh: Any, head: Any = None, block: Mapping[str, Any] = BLOCK_PLAN
) -> None:
    """Splits heads, the features of the MLP, and the vocabulary."""
    for layer in model.model.layers:
        parallelize_module(layer, mesh, dict(block))
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": head or ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    model.tie_weights()  # torch makes new parameters, of which each is alone.


def parallelize_sequence(model: Any, mesh: Any) -> None:
    """Splits sequences, too, between the parts that split features."""
    attention_inputs = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Shard(1)},
        desired_input_kwarg_layouts={"hidden_states": Replicate()},
    )
    block = {
        **BLOCK_PLAN,
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": attention_inputs,
        "mlp": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize(model, mesh, head, block)
    first_inputs = PrepareModuleInput(
        input_layouts=(Replicate(),),
        desired_input_layouts=(Shard(1),),
        use_local_output=True,
    )
    plan: dict[str, Any] = {
        "model.layers.0": first_inputs,
        "model.norm": SequenceParallel(),
    }
    parallelize_module(model, mesh, plan)


def apply_own_plan(model: Any, mesh: Any) -> None:
    """Applies the model's own plan; the functions depend on the version of transformers."""
    parameters = inspect.signature(apply_tensor_parallelism).parameters
    if "tp_plan" not in parameters:
        apply_tensor_parallelism(model, mesh)
        return
    from transformers.distributed.configuration_utils import DistributedConfig

    plan = resolve_tp_plan(model, DistributedConfig(tp_size=mesh.size()))
    apply_tensor_parallelism(model, mesh, plan)


def make_loss(apply: Any, **options: Any) -> Any:
    def loss_fn(params: Any, microbatch: dict[str, Tensor]) -> Tensor:
        output = apply(params, microbatch["ids"], use_cache=False, **options)
        losses = ps.losses.cross_entropy(output.logits, microbatch["labels"])
        return losses * microbatch["scale"]

    return loss_fn


def make_sharded_loss(apply: Any, mesh: Any) -> Any:
    """Leaves the vocabulary of logits split."""

    def loss_fn(params: Any, microbatch: dict[str, Tensor]) -> Tensor:
        with loss_parallel():
            output = apply(params, microbatch["ids"], use_cache=False)
            labels = microbatch["labels"]
            flat_labels = DTensor.from_local(labels.flatten(), mesh, [Replicate()])
            losses: Any = functional.cross_entropy(
                output.logits.flatten(0, 1), flat_labels, reduction="none"
            )
        return losses.to_local().view(labels.shape) * microbatch["scale"]

    return loss_fn


SHARDED_HEAD = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
CASES = {
    "Llama": Case(make_llama, parallelize),
    "Llama, tied, odd vocabulary": Case(
        partial(make_llama, tie_word_embeddings=True, vocab_size=65), parallelize
    ),
    "Qwen 2, tied": Case(make_tied_qwen, parallelize),
    "Llama, sequence parallel": Case(make_llama, parallelize_sequence),
    "Llama, loss_parallel": Case(
        make_llama, partial(parallelize, head=SHARDED_HEAD), make_sharded_loss
    ),
    "Llama, tp_plan": Case(make_llama, apply_own_plan),
    "Qwen3, tp_plan": Case(make_qwen, apply_own_plan),
}
WAYS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "in a step": {"gather": "step"},
    "in a microbatch": {"gather": "microbatch"},
    "units": {"gather": "loss", "units": is_block},
    "units, remat": {"gather": "loss", "units": is_block, "remat": True},
}


def make_texts(update: int) -> list[dict[str, Tensor]]:
    """Makes three microbatches of uneven size."""
    generator = torch.Generator().manual_seed(update)
    texts = []
    for index, rows in enumerate((1, 3, 2)):
        ids = torch.randint(1, 64, (rows, 6), generator=generator)
        is_bad = update == SKIPPED and index == 2
        scale = torch.tensor(math.nan if is_bad else 1.0, dtype=torch.float64)
        texts.append({"ids": ids, "labels": ps.shift_labels(ids), "scale": scale})
    return texts


Result = tuple[dict[str, Tensor], list[tuple[float, float, bool]]]


def train(step: Any, params: Any, select: Callable[..., Any] = lambda x: x) -> Result:
    """Takes three updates; returns full params, and losses, norms and whether each was applied."""
    opt_state = OPTIMIZER.init(params)
    figures = []
    for update in range(3):
        group = select(make_texts(update))
        params, opt_state, metrics = step(params, opt_state, group)
        figures.append(
            (float(metrics.loss), float(metrics.grad_norm), bool(metrics.applied))
        )
    return ps.unshard(params), figures


@cache
def train_in_one_process(name: str) -> Result:
    params, apply = ps.from_module(CASES[name].make())
    step = ps.make_update_step(
        make_loss(apply), OPTIMIZER, weight_fn=ps.label_weights, on_nonfinite="skip"
    )
    return train(step, params)


def train_on_ranks(grid: Grid, name: str, way: str) -> Result:
    """Trains on two ranks of dp, which have other microbatches, and two of tp."""
    case = CASES[name]
    axis: Any = grid.first
    tp: Any = grid.second
    model = case.make()
    case.parallelize(model, tp.mesh)
    settings = dict(WAYS[way])
    from_settings = {
        key: settings.pop(key) for key in ("units", "remat") if key in settings
    }
    params, apply = ps.from_module(model, **from_settings)
    loss_fn = make_loss(apply)
    if case.make_loss is not None:
        loss_fn = case.make_loss(apply, tp.mesh)
    if settings:
        params = ps.shard(params, axis)
    step = ps.make_update_step(
        loss_fn,
        OPTIMIZER,
        weight_fn=ps.label_weights,
        on_nonfinite="skip",
        axis=axis,
        **settings,
    )
    return train(step, params, lambda texts: [texts[:1], texts[1:]][axis.rank])


def check_close(actual: Result, expected: Result) -> None:
    params, figures = actual
    expected_params, expected_figures = expected
    for name, param in params.items():
        difference = torch.linalg.vector_norm(param - expected_params[name])
        norm = torch.linalg.vector_norm(expected_params[name])
        assert difference <= MAX_DISTANCE * norm, name
    for values, wanted in zip(figures, expected_figures, strict=True):
        assert values == pytest.approx(wanted, rel=MAX_DISTANCE, abs=0, nan_ok=True)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "units, remat") for name in CASES),
        ("Llama, sequence parallel", "replicated"),
        ("Qwen3, tp_plan", "replicated"),
    ],
)
def test_a_plan(world: World, name: str, way: str) -> None:
    args = [name] * 4, [way] * 4
    for result in on_processes(world, GRID, train_on_ranks, *args):
        check_close(result, train_in_one_process(name))


@pytest.mark.parametrize("way", ["in a step", "in a microbatch", "units"])
def test_shards_of_shards(world: World, way: str) -> None:
    args = ["Llama, tied, odd vocabulary"] * 4, [way] * 4
    for result in on_processes(world, GRID, train_on_ranks, *args):
        check_close(result, train_in_one_process("Llama, tied, odd vocabulary"))


# What stays the same: memory, modules, checkpoints


def count_kept_elements(grid: Grid, units: Any) -> int:
    """Counts the elements of params that the graph of a loss keeps, beyond the shards."""
    tp: Any = grid.second
    model = make_llama()
    parallelize(model, tp.mesh)
    params, apply = ps.from_module(model, units=units)
    shards = ps.shard(params, grid.first)
    local = tree.map(lambda x: x.requires_grad_(), shards)
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        plain = x.to_local() if isinstance(x, DTensor) else x
        storage = plain.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes() // plain.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        apply(local, torch.ones(1, 1, dtype=torch.int64), use_cache=False)
    return sum(kept.values())


def test_the_graph_of_a_unit_keeps_no_dtensor(world: World) -> None:
    """Keeps the activations, and not the params of the blocks, each a DTensor in the graph."""
    whole = on_processes(world, GRID, count_kept_elements, [None] * 4)
    units = on_processes(world, GRID, count_kept_elements, [is_block] * 4)
    params, _ = ps.from_module(make_llama())
    in_blocks = sum(p.numel() for name, p in params.items() if ".layers." in name)
    for kept, kept_by_units in zip(whole, units, strict=True):
        assert kept - kept_by_units > 0.45 * in_blocks


def step_with_checkpoints(grid: Grid) -> Result:
    """Recomputes parts of units in the backward pass, where the units' params are DTensors."""
    axis: Any = grid.first
    tp: Any = grid.second
    model = make_llama()
    model_families.enable_checkpoints(model, {"use_reentrant": False})
    parallelize(model.train(), tp.mesh)
    params, apply = ps.from_module(model, units=is_block)
    step = ps.make_update_step(
        make_loss(apply),
        OPTIMIZER,
        weight_fn=ps.label_weights,
        on_nonfinite="skip",
        axis=axis,
        gather="loss",
    )
    shards = ps.shard(params, axis)
    return train(step, shards, lambda texts: [texts[:1], texts[1:]][axis.rank])


def test_checkpoints_inside_of_units(world: World) -> None:
    for result in on_processes(world, GRID, step_with_checkpoints):
        check_close(result, train_in_one_process("Llama"))


def move_between_meshes(grid: Grid, path: Path) -> None:
    """Saves on dp and tp, loads on dp alone, and the other way; reads a model on "meta"."""
    tp: Any = grid.second
    model = make_llama(vocab_size=65)
    full, _ = ps.from_module(model)
    parallelize(model, tp.mesh)
    params, _ = ps.from_module(model)
    shards = ps.shard(params, grid.first)
    for gathered in (ps.unshard(params), ps.unshard(shards)):
        assert_equal(gathered, full)
    # Two rows over tp, and of each over dp: one rank of dp has none, and starts at the next one's.
    both = {"a": torch.ones(4, 3), "w": torch.arange(6.0).view(2, 3)}
    small = ps.shard(ps.shard(both, tp), grid.first)
    ps.checkpoint.save(path / "small", small)
    assert_equal(ps.checkpoint.load(path / "small", like=small), small)
    state = shards, OPTIMIZER.init(shards)
    ps.checkpoint.save(path / "tp", state)
    assert_equal(ps.checkpoint.load(path / "tp", like=state), state)

    other = ps.shard(tree.map(torch.zeros_like, full), grid.both)
    loaded, _ = ps.checkpoint.load(path / "tp", like=(other, OPTIMIZER.init(other)))
    assert_equal(ps.unshard(loaded), full)
    ps.checkpoint.save(path / "dp", loaded)
    zeros = tree.map(torch.zeros_like, shards)
    assert_equal(ps.checkpoint.load(path / "dp", like=zeros), shards)

    for folder, prefix in (("tp", "tree[0]"), ("dp", "tree")):
        state_dict = {
            f"{prefix}[{name!r}]": torch.zeros_like(p) for name, p in full.items()
        }
        load(state_dict, checkpoint_id=path / folder)
        assert_equal([*state_dict.values()], [*full.values()])

    ps.checkpoint.export_safetensors(path / "model.safetensors", shards)
    with init_empty_weights(include_buffers=False):
        empty = make_llama(vocab_size=65)
    parallelize(empty, tp.mesh)
    params, _ = ps.from_module(empty)
    like = ps.shard(params, grid.first)
    assert all(leaf.is_meta for leaf in tree.leaves(like))
    file = path / "model.safetensors"
    assert_equal(ps.checkpoint.load_safetensors(file, like=like), shards)


def assert_equal(actual: Any, expected: Any) -> None:
    for one, other in zip(tree.leaves(actual), tree.leaves(expected), strict=True):
        assert torch.equal(one, other)


def test_checkpoints_of_other_meshes(world: World, tmp_path: Path) -> None:
    on_processes(world, GRID, move_between_meshes, [tmp_path] * 4)


def write_back(grid: Grid) -> str:
    """Writes params back to the module; returns the error of params that are shards over dp."""
    tp: Any = grid.second
    model = make_llama(vocab_size=65)
    parallelize(model, tp.mesh)
    params, _ = ps.from_module(model)
    more = tree.map(lambda x: x + 1, params)
    for values in (more, tree.map(lambda x: x + 1, ps.unshard(more))):
        ps.to_module(values, model)
        for name, p in model.named_parameters():
            written = p.full_tensor() if isinstance(p, DTensor) else p
            value = ps.unshard(values[name])
            assert torch.equal(written, value), name
    try:
        ps.to_module(ps.shard(params, grid.first), model)
    except ValueError as error:
        return str(error)
    return ""


def test_values_go_back_to_the_module(world: World) -> None:
    for message in on_processes(world, GRID, write_back):
        assert "is a shard over MeshAxis('dp', 2 ranks): pass ps.unshard" in message


def evaluate(grid: Grid) -> tuple[float, float]:
    """Evaluates, and computes a loss with the base of adapters in shards; returns both losses."""
    tp: Any = grid.second
    model = make_llama()
    parallelize(model, tp.mesh)
    params, apply = ps.from_module(model, trainable="*norm.weight", units=is_block)
    eval_step = ps.make_eval_step(make_loss(apply.eval), axis=grid.first)
    texts = make_texts(0)
    metrics = eval_step(params, texts[:1] if grid.first.rank else texts[1:])  # type: ignore[attr-defined]
    frozen = ps.shard(apply.frozen, grid.first)
    loss = make_loss(apply, frozen=frozen)(params, texts[0]).sum()
    return float(metrics.loss), float(loss)


def test_evaluation_and_frozen_params(world: World) -> None:
    params, apply = ps.from_module(make_llama())
    metrics = ps.make_eval_step(make_loss(apply.eval))(params, make_texts(0))
    loss = make_loss(apply)(params, make_texts(0)[0]).sum()
    expected = pytest.approx((float(metrics.loss), float(loss)), rel=MAX_DISTANCE)
    assert on_processes(world, GRID, evaluate) == [expected] * 4


# What is refused


def step_on_other_tokens(grid: Grid) -> Any:
    """Gives each rank its microbatch, those of tp among them."""
    tp: Any = grid.second
    both: Any = grid.both
    model = make_llama()
    parallelize(model, tp.mesh)
    params, apply = ps.from_module(model)
    step = ps.make_update_step(make_loss(apply), OPTIMIZER, axis=grid.first)
    group = make_texts(both.rank + 2)[:1]
    return step(params, OPTIMIZER.init(params), group)


def step_on_heads(grid: Grid) -> Any:
    """Lets norms of heads, which differ by rank, get a part of their gradient."""
    tp: Any = grid.second
    model = make_qwen()
    parallelize(model, tp.mesh)
    params, apply = ps.from_module(model)
    step = ps.make_update_step(make_loss(apply), OPTIMIZER, axis=grid.first)
    return step(params, OPTIMIZER.init(params), make_texts(0))


def step_after_nothing(grid: Grid, first: str) -> Any:
    """Lets a replicated param get a part of its gradient, after an update that shows nothing."""
    axis: Any = grid.first
    tp: Any = grid.second
    params = {"scale": torch.ones(4), "w": ps.shard(torch.ones(2), tp)}

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        rows = torch.eye(4)[2 * tp.rank : 2 * tp.rank + 2]
        part = (rows @ params["scale"]) * (tp.rank + 1) * x[:, :1]
        return ps.psum(part.sum(-1) * params["w"][0], tp)

    step = ps.make_update_step(
        loss_fn,
        ps.optim.sgd(0.1),
        weight_fn=lambda x: x[:, 1] > 0,
        axis=axis,
        on_nonfinite="skip",
    )
    values = {"zero": 0.0, "nan": math.nan, "no tokens": 1.0}
    weight = 0.0 if first == "no tokens" else 1.0
    state = params, ps.optim.sgd(0.1).init(params)
    new_params, opt_state, _ = step(*state, [torch.tensor([[values[first], weight]])])
    return step(new_params, opt_state, [torch.tensor([[1.0, 1.0]])])


def step_with_equal_norms(grid: Grid) -> Any:
    """Lets each rank of tp have a gradient of the same norm, in other entries."""
    tp: Any = grid.second
    params = {"scale": torch.ones(4), "w": ps.shard(torch.ones(2), tp)}

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        rows = torch.eye(4)[2 * tp.rank : 2 * tp.rank + 2]
        return ps.psum((rows @ params["scale"]).sum() * params["w"][0] * x, tp)

    optimizer = ps.optim.sgd(0.1)
    step = ps.make_update_step(
        loss_fn, optimizer, weight_fn=lambda x: x > 0, axis=grid.first
    )
    return step(params, optimizer.init(params), [torch.ones(1)])


def call_with_full_params(grid: Grid) -> Any:
    tp: Any = grid.second
    model = make_llama()
    parallelize(model, tp.mesh)
    params, apply = ps.from_module(model)
    return apply(ps.unshard(params), make_texts(0)[0]["ids"])


def step_with_shards_outside(grid: Grid) -> Any:
    inner = ps.shard({"w": torch.ones(4, 4)}, grid.second)
    params = {"w": inner["w"]}
    step = ps.make_update_step(
        lambda params, x: (x * params["w"]).sum(-1), OPTIMIZER, axis=grid.second
    )
    nested = ps.shard(params, grid.first)
    return step(nested, OPTIMIZER.init(nested), [torch.ones(1, 4)])


def split_over_two_dimensions(grid: Grid) -> Any:
    both: Any = grid.both
    model = torch.nn.Linear(4, 4)
    mesh = torch.distributed.device_mesh.DeviceMesh(
        "cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp")
    )
    weight = distribute_tensor(model.weight.detach(), mesh, [Shard(0), Shard(1)])
    model.weight = torch.nn.Parameter(weight)
    assert both.size == 4
    return ps.from_module(model)


def call_with_keys(grid: Grid) -> Any:
    tp: Any = grid.second
    model = make_llama()
    parallelize(model, tp.mesh)
    params, apply = ps.from_module(model)
    return apply(params, make_texts(0)[0]["ids"], key=ps.random.key(0)[None])


def differentiate_by_torch_func(grid: Grid) -> Any:
    tp: Any = grid.second
    model = make_llama()
    parallelize(model, tp.mesh)
    params, apply = ps.from_module(model)
    local = {name: getattr(p, "local", p) for name, p in params.items()}
    loss_fn = make_loss(apply)
    return torch.func.grad(lambda p: loss_fn(p, make_texts(0)[0]).sum())(local)


class ReplicatedWithGradAllReduce:
    """Wraps a module's forward under the name that transformers has for it."""

    def install_forward(self, module: Any, mesh: Any) -> None:
        original_forward = module.forward

        def tp_forward(x: Tensor) -> Any:
            assert mesh is not None
            return original_forward(x)

        module.forward = tp_forward


def split_with_another_forward(grid: Grid) -> Any:
    tp: Any = grid.second
    norm: Any = torch.nn.LayerNorm(4)
    norm.forward = lambda x: 2 * x
    ReplicatedWithGradAllReduce().install_forward(norm, tp.mesh)
    return ps.from_module(torch.nn.Sequential(norm))


def convert_nested_shards(grid: Grid) -> Any:
    return ps.to_dtensor(ps.shard(ps.shard(torch.ones(4), grid.second), grid.first))


PART_OF_A_GRADIENT = r"params\['scale'\] is the same on all ranks .* each has another"
REFUSED: dict[str, tuple[Callable[[Grid], Any], str]] = {
    "after zeros": (partial(step_after_nothing, first="zero"), PART_OF_A_GRADIENT),
    "after NaN": (partial(step_after_nothing, first="nan"), PART_OF_A_GRADIENT),
    "after no tokens": (
        partial(step_after_nothing, first="no tokens"),
        PART_OF_A_GRADIENT,
    ),
    "equal norms": (step_with_equal_norms, PART_OF_A_GRADIENT),
    "full params": (
        call_with_full_params,
        r"weight has shape .*this rank's part of the DTensor has shape .*ps\.shard",
    ),
    "other tokens": (
        step_on_other_tokens,
        r"the ranks of MeshAxis\('other', 2 ranks\).* different losses: .*same microbatches",
    ),
    "heads": (
        step_on_heads,
        r"norm.weight'\] is the same on all ranks of MeshAxis\('other', 2 ranks\), but each.*"
        r"ps\.pvary\(param, axis\)",
    ),
    "the step's axis outside": (
        step_with_shards_outside,
        r"params\['w'\].* is sharded over MeshAxis\('other', 2 ranks\), and inside of that over "
        r"MeshAxis\('dp', 2 ranks\), but this step is over MeshAxis\('other'.*step last",
    ),
    "two dimensions": (
        split_over_two_dimensions,
        r"weight is a DTensor .*mesh\[\"tp\"\]",
    ),
    "another forward": (split_with_another_forward, "0 has a forward of another kind"),
    "keys": (call_with_keys, "set the rates of dropout to 0"),
    "torch.func": (differentiate_by_torch_func, "DTensor.*call apply without"),
    "to_dtensor": (convert_nested_shards, "in one over .*ps.checkpoint"),
}


def catch(grid: Grid, case: str) -> str:
    program, _ = REFUSED[case]
    try:
        program(grid)
    except (ValueError, TypeError) as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize("case", REFUSED)
def test_refused(world: World, case: str) -> None:
    _, message = REFUSED[case]
    for text in on_processes(world, GRID, catch, [case] * 4):
        assert re.search(message, text), text
