"""Tests models that no rank could hold: made on the meta device, loaded in shards, trained by units."""

import ctypes
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

import purestep as ps
from purestep import tree
from purestep.checkpoint import export_safetensors, load_safetensors
from purestep.testing import ThreadAxis
from purestep.testing.processes import World
from support.strategies import assert_same
from support.torch_private import init_function_of
from support.worlds import Ranks, on_processes
from tests import model_families
from tests.model_families import SHAPE, is_block, is_block_or_mlp

OPTIMIZER = ps.optim.chain(ps.optim.clip_by_global_norm(1.0), ps.optim.adamw(0.1))


def make_llama(**config: Any) -> Any:
    return model_families.build_model("LlamaForCausalLM", **config)


def make_loss(apply: Any, **options: Any) -> Any:
    """Makes the loss of a causal model."""

    def loss_fn(params: Any, microbatch: dict[str, Tensor]) -> Tensor:
        ids = microbatch["ids"]
        logits = apply(params, input_ids=ids, use_cache=False, **options).logits
        return ps.losses.cross_entropy(logits, microbatch["labels"])

    return loss_fn


def make_texts() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    texts = []
    for rows in (1, 2, 3):
        ids = torch.randint(model_families.VOCABULARY, (rows, 5), generator=generator)
        texts.append({"ids": ids, "labels": ps.shift_labels(ids)})
    return texts


@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
def test_a_model_of_the_hub_that_no_rank_holds(
    tmp_path: Path, max_shard_size: str
) -> None:
    """Reads each rank's shards, of one file or several, and takes the step of the loaded model."""
    model = make_llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    texts = make_texts()
    params, apply = ps.from_module(model)
    step: Any = ps.make_update_step(make_loss(apply), OPTIMIZER)
    expected, _, expected_metrics = step(params, OPTIMIZER.init(params), texts)

    with init_empty_weights(include_buffers=False):
        empty = make_llama(tie_word_embeddings=True)
    empty.tie_weights()
    params, apply = ps.from_module(empty, units=is_block)
    assert all(p.is_meta for p in params.values())
    axis = ThreadAxis(2)
    step = ps.make_update_step(
        make_loss(apply), OPTIMIZER, axis=axis, gather="loss", donate=True
    )

    def program(group: Any) -> Any:
        shards = load_safetensors(tmp_path, like=ps.shard(params, axis))
        new_params, _, metrics = step(shards, OPTIMIZER.init(shards), group)
        return ps.unshard(new_params), metrics

    for new_params, metrics in axis.map(program)([texts[:1], texts[1:]]):
        for name, param in new_params.items():
            torch.testing.assert_close(param, expected[name])
        torch.testing.assert_close(metrics.loss, expected_metrics.loss)


@pytest.mark.parametrize("remat", [False, True])
def test_adapters_on_a_base_in_shards(tmp_path: Path, remat: bool) -> None:
    """Trains adapters whose base is sharded, too: each rank reads its part of that."""
    model = model_families.make_model("LoRA on Llama")
    params, apply = ps.from_module(model)
    export_safetensors(tmp_path / "base.safetensors", apply.frozen)
    texts = make_texts()
    step: Any = ps.make_update_step(make_loss(apply), OPTIMIZER)
    expected, _, _ = step(params, OPTIMIZER.init(params), texts)

    for name, p in apply.frozen.items():
        owner, _, key = name.rpartition(".")
        empty = nn.Parameter(p.to("meta"), requires_grad=False)
        setattr(model.get_submodule(owner), key, empty)
    params, apply = ps.from_module(model, units=is_block_or_mlp, remat=remat)
    axis = ThreadAxis(2)
    with pytest.raises(ValueError, match=r"frozen lacks .*load_safetensors"):
        make_loss(apply)(params, texts[0])

    def program(group: Any) -> Any:
        base = load_safetensors(tmp_path, like=ps.shard(apply.frozen, axis))
        loss_fn = make_loss(apply, frozen=base)
        step = ps.make_update_step(loss_fn, OPTIMIZER, axis=axis, gather="loss")
        shards = ps.shard(params, axis)
        return ps.unshard(step(shards, OPTIMIZER.init(shards), group)[0])

    for new_params in axis.map(program)([texts[:1], texts[1:]]):
        for name, param in new_params.items():
            torch.testing.assert_close(param, expected[name])


# Memory that ends


WIDTH = 1024
BLOCKS = 32
LIMIT = 115
"""How many MiB more each rank may use, of 128 MiB of params."""
MEBIBYTE = 2**20
M_MMAP_THRESHOLD = -3


class Block(nn.Module):
    """A layer of four mebibytes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight)


def make_blocks(num_blocks: int) -> nn.Module:
    """Makes blocks on the meta device."""
    with torch.device("meta"):
        return nn.Sequential(*(Block() for _ in range(num_blocks)))


def write_large(path: Path) -> None:
    """Writes all params."""
    params, _ = ps.from_module(make_blocks(BLOCKS))
    generator = torch.Generator().manual_seed(0)
    values = {}
    for name, param in params.items():
        values[name] = torch.randn(param.shape, generator=generator) / WIDTH
    export_safetensors(path, values)


def address_space() -> int:
    """Returns the bytes that this process has mapped."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


def train_blocks(axis: ps.Axis, path: Path, num_blocks: int) -> tuple[float, ...]:
    """Loads the first blocks, each rank its shards, and takes an update.

    Returns the loss and the norm of the gradients.
    """
    params, apply = ps.from_module(make_blocks(num_blocks), units=Block)
    optimizer = ps.optim.sgd(1e-4)
    step = ps.make_update_step(
        lambda params, x: apply(params, x).square().sum(-1),
        optimizer,
        weight_fn=lambda x: torch.ones(len(x)),
        axis=axis,
        gather="loss",
        donate=True,
    )
    shards = load_safetensors(path, like=ps.shard(params, axis))
    opt_state = optimizer.init(shards)
    *_, metrics = step(shards, opt_state, [torch.ones(1, WIDTH)])
    return float(metrics.loss), float(metrics.grad_norm)


def train_within_limit(axis: ps.Axis, path: Path) -> tuple[float, ...] | str:
    """Trains where the address space ends; returns its figures, or the error."""
    # As MALLOC_MMAP_THRESHOLD_=65536: otherwise glibc keeps holes between gradients that are alive,
    # of several times the model.
    ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, 65536)
    # What torch maps at its first use is no memory of the model.
    train_blocks(axis, path, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = address_space() + LIMIT * MEBIBYTE
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        return train_blocks(axis, path, BLOCKS)
    except (RuntimeError, MemoryError) as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def train_together_and_alone(axis: Any, path: Path) -> list[Any]:
    """Trains on all ranks, and then on the first one alone, which has all shards."""
    together = train_within_limit(axis, path)
    if axis.rank:
        return [together]
    return [together, train_within_limit(ps.LocalAxis(), path)]


def test_params_that_are_larger_than_the_memory_of_a_rank(
    world: World, tmp_path: Path
) -> None:
    """Trains on four ranks what one rank alone cannot, under the same limit."""
    path = tmp_path / "model.safetensors"
    write_large(path)
    first, *others = on_processes(world, Ranks(4), train_together_and_alone, [path] * 4)
    together, alone = first
    assert isinstance(together, tuple), together
    assert min(together) > 0
    assert others == [[together]] * 3
    assert "memory" in alone.lower()


# What is refused


def test_names_that_the_files_lack(tmp_path: Path) -> None:
    export_safetensors(tmp_path / "model.safetensors", {"other": torch.ones(2)})
    with pytest.raises(ValueError, match=r"lacks 1 of 1 tensors: weight; it has other"):
        load_safetensors(tmp_path, like={"weight": torch.ones(2)})


def test_other_shapes(tmp_path: Path) -> None:
    export_safetensors(tmp_path / "model.safetensors", {"weight": torch.ones(3)})
    with pytest.raises(
        ValueError, match=r"weight has shape \(3,\) .* like= has \(2,\)"
    ):
        load_safetensors(tmp_path, like={"weight": torch.ones(2)})


@pytest.mark.parametrize("names", [[], ["a", "b"]])
def test_a_folder_without_one_model(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        export_safetensors(tmp_path / f"{name}.safetensors", {"w": torch.ones(1)})
    with pytest.raises(FileNotFoundError, match="is neither a file of safetensors"):
        load_safetensors(tmp_path, like={"w": torch.ones(1)})


@pytest.mark.parametrize("num_bytes", [4, 40, 130])
def test_a_file_that_was_cut_short(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "model.safetensors"
    export_safetensors(path, {"weight": torch.ones(9, 9)})
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ValueError, match="cut short"):
        load_safetensors(path, like={"weight": torch.ones(9, 9)})


def test_a_header_whose_offsets_do_not_fit_the_shape(tmp_path: Path) -> None:
    """Otherwise the numbers behind this tensor would be read."""
    path = tmp_path / "model.safetensors"
    export_safetensors(path, {"weight": torch.ones(9, 9)})
    data = path.read_bytes()
    path.write_bytes(data.replace(b"[9,9]", b"[8,9]"))
    with pytest.raises(ValueError, match="copy it again"):
        load_safetensors(path, like={"weight": torch.ones(8, 9)})


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"weight_map": 3}'])
def test_a_damaged_index_names_its_path(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index.json is no index of files"):
        load_safetensors(tmp_path, like={"weight": torch.ones(1)})


def write_index(folder: Path, **file_of: str) -> None:
    index = {"weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_an_index_says_where_a_name_is(tmp_path: Path) -> None:
    """Another file, which it lists for another name, has an older tensor of this name."""
    export_safetensors(tmp_path / "1.safetensors", {"a": torch.ones(2)})
    others = {"a": torch.zeros(2), "b": torch.ones(2)}
    export_safetensors(tmp_path / "2.safetensors", others)
    like = {"a": torch.ones(2)}

    write_index(tmp_path, a="1.safetensors", b="2.safetensors")
    assert_same(load_safetensors(tmp_path, like=like), like)
    write_index(tmp_path, b="2.safetensors")
    with pytest.raises(ValueError, match="lacks 1 of 1 tensors: a"):
        load_safetensors(tmp_path, like=like)
    write_index(tmp_path, b="1.safetensors")
    with pytest.raises(ValueError, match=r"b is in 1\.safetensors, which lacks it"):
        load_safetensors(tmp_path, like={"b": torch.ones(2)})


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ([torch.ones(1)], "like must be a dict of params by name, got list"),
        ({"a": {"b": torch.ones(1)}}, r"like\['a'\] is dict, no tensor"),
        ({0: torch.ones(1)}, "like has the key 0: names in files are texts"),
    ],
)
def test_names_lead_to_tensors(tmp_path: Path, like: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        load_safetensors(tmp_path, like=like)


def test_shards_along_any_dimension(tmp_path: Path) -> None:
    """Reads what ``ps.shard`` would cut, uneven and empty shards too."""
    full = torch.arange(60, dtype=torch.int32).view(3, 4, 5)
    export_safetensors(tmp_path / "model.safetensors", {"w": full})
    axis = ThreadAxis(4)

    def program(rank: int) -> None:
        for dim in range(3):
            expected = ps.shard({"w": full}, axis, dim)
            like = ps.shard({"w": torch.empty(3, 4, 5, device="meta")}, axis, dim)
            loaded = load_safetensors(tmp_path, like=like)
            assert torch.equal(loaded["w"].local, expected["w"].local.float())

    axis.map(program)(range(4))


def test_shards_of_ranks_that_are_no_processes(tmp_path: Path) -> None:
    """Loads all rows for one rank; refuses ranks under vmap."""
    full = {"w": torch.arange(3.0)}
    export_safetensors(tmp_path / "model.safetensors", full)
    like = ps.shard(full, ps.LocalAxis())
    assert_same(ps.unshard(load_safetensors(tmp_path, like=like)), full)
    simulated = {"w": ps.Shard(torch.ones(2), ps.VmapAxis(2), (3,))}
    with pytest.raises(TypeError, match="ranks are in this process"):
        load_safetensors(tmp_path, like=simulated)


def test_other_dtypes_and_scalars_are_converted(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    export_safetensors(path, {"s": torch.tensor(2.0), "w": torch.tensor([1, 2])})
    like = {"s": torch.zeros((), dtype=torch.bfloat16), "w": torch.zeros(2)}
    loaded = load_safetensors(path, like=like)
    expected = {"s": torch.tensor(2.0).bfloat16(), "w": torch.tensor([1.0, 2.0])}
    assert_same(loaded, expected)


def describe_device(make: Callable[[], Tensor]) -> str:
    """Returns the device of a tensor, or the error where it cannot be made."""
    try:
        return str(make().device)
    except RuntimeError as error:
        return str(error)


def test_device_0_is_the_first_accelerator(tmp_path: Path) -> None:
    """Without an accelerator it is refused, as torch refuses it."""
    path = tmp_path / "model.safetensors"
    state = {"w": torch.ones(2)}
    export_safetensors(path, state)

    device = describe_device(lambda: load_safetensors(path, state, device=0)["w"])

    assert device == describe_device(lambda: torch.empty(2, device=0))


def test_params_without_values_are_refused() -> None:
    params, apply = ps.from_module(nn.Linear(2, 2, device="meta"))
    step = ps.make_update_step(
        lambda p, x: apply(p, x).sum(-1), OPTIMIZER, weight_fn=lambda x: x[:, 0] > 0
    )
    with pytest.raises(ValueError, match="has no values on the meta device"):
        step(params, OPTIMIZER.init(params), [torch.ones(1, 2)])


# First values


def make_net() -> nn.Module:
    """Makes layers that initialize themselves, two of them with one weight."""
    first = nn.Linear(5, 5)
    last = nn.Linear(5, 5, bias=False)
    last.weight = first.weight
    return nn.Sequential(nn.Embedding(7, 5), first, nn.LayerNorm(5), last)


def reset_shards(axis: ps.Axis, units: Any) -> dict[str, Tensor]:
    """Initializes the shards of a model on "meta"; returns full params."""
    with torch.device("meta"):
        module = make_net()
    params, _ = ps.from_module(module)
    torch.manual_seed(3)
    like = ps.shard(params, axis)
    drawn = ps.reset_parameters(module, like=like, units=units)
    assert all(p.is_meta for p in module.parameters())
    full: dict[str, Tensor] = ps.unshard(drawn)
    return full


@pytest.mark.parametrize("units", [None, nn.Linear, (nn.Embedding, nn.LayerNorm)])
def test_each_rank_draws_its_shards(world: World, units: Any) -> None:
    """Draws what one process draws, uneven and empty shards too."""
    module = make_net()
    torch.manual_seed(3)
    for part in module.modules():
        if part is not module:
            part.reset_parameters()  # type: ignore[operator]
    expected, _ = ps.from_module(module)
    for size in (2, 4):
        for full in on_processes(world, Ranks(size), reset_shards, [units] * size):
            assert_same(full, expected)


@pytest.mark.parametrize("units", [None, is_block])
def test_what_a_block_scales_in_its_layers(units: Any) -> None:
    """Initializes GPT-2, whose blocks scale weights of layers inside of them."""
    settings = {"initializer_range": 0.5, "n_layer": 8}
    model = model_families.build_model("GPT2LMHeadModel", SHAPE, **settings)
    torch.manual_seed(0)
    model.apply(init_function_of(model))
    params, _ = ps.from_module(model)
    before = tree.map(torch.clone, params)
    torch.manual_seed(0)
    reset = init_function_of(model)
    drawn = ps.reset_parameters(model, like=params, reset=reset, units=units)
    projection = "transformer.h.0.attn.c_proj.weight"
    assert float(drawn[projection].std()) < 0.25
    assert_same(drawn, before)
    assert_same(dict(model.named_parameters()), before)


class Scaled(nn.Linear):
    """Has a param that nothing initializes."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale = nn.Parameter(torch.ones(2))


class WritesInside(nn.Module):
    """Sets a weight of a layer inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.layer.weight)


def test_values_that_would_be_lost() -> None:
    module: nn.Module = Scaled()
    with pytest.raises(ValueError, match="nothing initializes scale"):
        ps.reset_parameters(module, like=ps.from_module(module)[0])
    module = nn.Sequential(Scaled())
    with pytest.raises(ValueError, match=r"nothing initializes 0\.scale"):
        ps.reset_parameters(module, like=ps.from_module(module)[0])
    module = WritesInside()
    params, _ = ps.from_module(module)
    drawn = ps.reset_parameters(module, like=params)
    assert not drawn["layer.weight"].any()
    with pytest.raises(ValueError, match=r"around layer\.weight writes to it"):
        ps.reset_parameters(module, like=params, units=nn.Linear)
    like = {"layer.bias": params["layer.bias"]}
    assert len(ps.reset_parameters(module, like=like, units=nn.Linear)) == 1
    norm = nn.BatchNorm1d(2)
    norm(torch.randn(4, 2))
    before = norm.running_mean.clone()  # type: ignore[union-attr]
    ps.reset_parameters(norm, like=ps.from_module(norm)[0])
    assert torch.equal(norm.running_mean, before)  # type: ignore[arg-type]


def test_a_reset_of_a_unit_that_lies_in_two_places() -> None:
    """It is reset in both, one after the other, as by ``module.apply``."""
    shared = nn.Linear(2, 2)
    first = nn.Sequential(shared)
    second = nn.Sequential(shared)
    module = nn.Sequential(first, second)
    params, _ = ps.from_module(module)
    torch.manual_seed(0)
    by_unit = ps.reset_parameters(module, like=params, units=nn.Linear)
    torch.manual_seed(0)
    at_once = ps.reset_parameters(module, like=params)
    assert_same(by_unit, at_once)


@pytest.mark.parametrize("training", [False, True])
def test_a_reset_sees_the_mode_of_the_module(training: bool) -> None:
    def fill_by_mode(part: nn.Module) -> None:
        if isinstance(part, nn.Linear):
            nn.init.constant_(part.weight, float(part.training))

    module = nn.Linear(2, 2, bias=False).train(training)
    params, _ = ps.from_module(module)
    drawn = ps.reset_parameters(module, like=params, reset=fill_by_mode)
    assert_same(drawn["weight"], torch.full((2, 2), float(training)))


def test_a_function_that_initializes_models_of_transformers() -> None:
    with init_empty_weights(include_buffers=False):
        empty = make_llama(tie_word_embeddings=True)
    empty.tie_weights()
    params, _ = ps.from_module(empty)
    drawn = ps.reset_parameters(empty, like=params, reset=init_function_of(empty))
    std = empty.config.initializer_range
    for name, p in drawn.items():
        if "norm" in name:
            assert torch.equal(p, torch.ones_like(p))
        else:
            # Within five deviations of a mean and of a deviation of so many numbers.
            assert abs(float(p.mean())) < 5 * std / p.numel() ** 0.5
            assert abs(float(p.std()) - std) < 5 * std / (2 * p.numel()) ** 0.5

    with pytest.raises(ValueError, match=r"LlamaRMSNorm.*no reset_parameters.*reset="):
        ps.reset_parameters(empty, like=params)
    with pytest.raises(ValueError, match="has no parameter other"):
        ps.reset_parameters(nn.Linear(1, 1), like={"other": torch.ones(1)})


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"weight": 1}',
        b'{"weight": {"data_offsets": [0]}}',
        b'{"weight": {"data_offsets": [-9, 4], "shape": [1], "dtype": "F32"}}',
        b'{"weight": {"data_offsets": [0.5, 4], "shape": [1], "dtype": "F32"}}',
    ],
)
def test_a_header_that_names_no_tensors(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match="cut short"):
        load_safetensors(path, like={"weight": torch.ones(1)})


DTYPES = [
    torch.complex64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_export_writes_is_loaded(tmp_path: Path, dtype: torch.dtype) -> None:
    tree = {"w": torch.tensor([1.0, 2.0]).to(dtype)}
    export_safetensors(tmp_path / "model.safetensors", tree)
    assert_same(load_safetensors(tmp_path / "model.safetensors", like=tree), tree)
