"""Compares steps on models of transformers with ``loss.backward()`` on one big batch, and tests README.md's claims."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import apply_chunking_to_forward

import purestep as ps
from purestep.nn import huggingface
from purestep.testing.bounds import rounding_bound
from support.torch_private import count_forward_hooks
from tests import model_families
from tests.model_families import (
    SETTINGS,
    WINDOW,
    Setting,
    build_model,
    make_model,
    with_large_weights,
)

# Of torch, for flash attention on a CPU under vmap.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")
TRACED = partial(torch.compile, backend="aot_eager")


EAGER_CASES = [
    (family, setting)
    for family, setting in model_families.supported_cases()
    if "compile" not in SETTINGS[setting].step
]


@pytest.mark.parametrize(("family", "setting"), EAGER_CASES)
def test_a_step_is_one_big_batch(family: str, setting: str) -> None:
    error, bound, same_bits = model_families.measure_step(family, SETTINGS[setting])
    assert error <= bound
    assert same_bits in (True, None)
    assert bound < torch.inf or same_bits


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("Llama", "position_ids"),
        ("BERT", "2D mask"),
    ],
)
def test_compiled_too(family: str, form: Any) -> None:
    """Compiles two, whose masks are made of values otherwise, of one microbatch.

    benchmarks/speed/families.py compiles all.
    """
    eager = Setting(form)
    compiled = Setting(form, step={"compile": TRACED})
    groups = model_families.make_groups(family, eager)
    group = [groups[0][:1]]
    expected = model_families.compute_step_grads(family, eager, group)
    actual = model_families.compute_step_grads(family, compiled, group)
    bound = rounding_bound(model_families.ROUNDINGS, torch.float32)
    for name, grad in expected.items():
        error = (actual[name] - grad).norm()
        assert error <= bound * grad.norm(), name


class Chunked(nn.Module):
    """Runs a layer in chunks as DistilBERT does, which has no ``feed_forward_chunk``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def ff_chunk(self, x: Tensor) -> Any:
        return self.layer(x)

    def forward(self, x: Tensor) -> Any:
        return apply_chunking_to_forward(self.ff_chunk, 0, 1, x)


def test_chunks_of_any_name_are_compiled() -> None:
    module = Chunked()
    params, apply = ps.from_module(module)
    x = torch.ones(2, 3, 4)
    compiled = torch.compile(lambda p, x: apply(p, x), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(params, x), module(x))


def packed(family: str = "Llama") -> dict[str, Any]:
    return ps.pack_documents(
        model_families.make_examples(family), row_tokens=model_families.ROW
    )


def test_a_microbatch_may_hold_strings_and_its_loss_is_no_mean() -> None:
    params, apply = ps.from_module(make_model("Llama"))
    examples = model_families.make_examples("Llama")
    (m,) = ps.pack(examples, max_tokens=100)
    sgd = ps.optim.sgd(0.1)

    def train(loss_fn: Any) -> Any:
        microbatch = transformers.BatchEncoding({**m, "text": ["a", "b"]})
        step = ps.make_update_step(loss_fn, sgd)
        state = sgd.init(params)
        return step(params, state, [microbatch])

    def loss_fn(p: Any, m: Any) -> Tensor:
        logits = apply(p, m["input_ids"]).logits
        return ps.losses.cross_entropy(logits, m["labels"])

    def loss_of_the_model(p: Any, m: Any) -> Tensor:
        output = apply(p, m["input_ids"], labels=m["labels"])
        return output.loss

    def output_of_the_model(p: Any, m: Any) -> Any:
        return apply(p, m["input_ids"])

    _, _, metrics = train(loss_fn)
    assert metrics.num_tokens == (m["labels"] != -100).sum()
    with pytest.raises(ValueError, match="a scalar is most likely a mean"):
        train(loss_of_the_model)
    with pytest.raises(TypeError, match="got CausalLMOutputWithPast"):
        train(output_of_the_model)


def relative_change(module: Any, family: str, m: Any, inputs: Any) -> float:
    """Computes by how much the loss of texts changes when they are packed into a microbatch."""
    params, apply = ps.from_module(with_large_weights(module))

    def total_loss(m: Any, **inputs: Any) -> Tensor:
        inputs = {"use_cache": False, **inputs}
        logits = apply(params, input_ids=m["input_ids"], **inputs).logits
        losses = ps.losses.cross_entropy(logits, m["labels"])
        return losses.sum().detach()

    alone = sum(
        total_loss(ps.pack([text], max_tokens=100)[0])
        for text in model_families.make_examples(family)
    )
    together = total_loss(m, **inputs)
    return float((together / alone - 1).abs())


def with_positions(m: Any, **inputs: Any) -> dict[str, Any]:
    return {"position_ids": m["positions"], **inputs}


def with_2d_mask(m: Any) -> dict[str, Any]:
    return with_positions(m, attention_mask=m["attention_mask"])


def with_segment_mask(m: Any, window: int | None = None) -> dict[str, Any]:
    mask = ps.segment_mask(m["segments"], window=window)
    return with_positions(m, attention_mask=mask)


def with_mask_by_layer_type(m: Any) -> dict[str, Any]:
    masks = {
        "full_attention": ps.segment_mask(m["segments"]),
        "sliding_attention": ps.segment_mask(m["segments"], window=WINDOW),
    }
    return with_positions(m, attention_mask=masks)


with_cache = partial(with_positions, use_cache=True)
with_sliding_mask = partial(with_segment_mask, window=WINDOW)
GEMMA3 = partial(
    build_model,
    "Gemma3ForCausalLM",
    head_dim=8,
    sliding_window=WINDOW,
    query_pre_attn_scalar=8,
    layer_types=["sliding_attention", "full_attention"],
)
IN_ONE_ROW: list[tuple[Any, str, Callable[[Any], Any], bool]] = [
    ("Llama", "Llama", with_positions, True),
    ("Llama", "Llama", with_cache, False),
    ("Llama", "Llama", with_2d_mask, False),
    ("GPT-2", "GPT-2", with_2d_mask, False),
    ("BERT", "BERT", with_positions, False),
    ("Mistral", "Mistral", with_sliding_mask, True),
    ("Mistral", "Mistral", with_segment_mask, False),
    (GEMMA3, "Llama", with_positions, True),
    (GEMMA3, "Llama", with_mask_by_layer_type, True),
    (GEMMA3, "Llama", with_segment_mask, False),
    (GEMMA3, "Llama", with_sliding_mask, False),
]
"""Models, the family of their texts, inputs, and whether documents stay apart."""


@pytest.mark.parametrize(("make", "family", "inputs", "right"), IN_ONE_ROW)
def test_documents_in_one_row(make: Any, family: str, inputs: Any, right: bool) -> None:
    """Compares the loss of packed texts with that of each alone, as README.md says of models."""
    if isinstance(make, str):
        make = model_families.FAMILIES[make].make
    module = make()
    m = packed(family)
    change = relative_change(module, family, m, inputs(m))
    if right:
        assert change < 1e-6
    else:
        assert change > 1e-4


@pytest.mark.parametrize("family", ["GPT-2", "Llama", "LoRA on Llama"])
def test_a_cache_joins_packed_documents_and_is_refused(
    family: str, fresh_compiler: None
) -> None:
    apply: Any
    params, apply = ps.from_module(make_model(family))
    m = packed(family)
    ids = {"input_ids": m["input_ids"]}
    inputs = {**ids, "position_ids": m["positions"]}
    forms = [apply]
    if family == "Llama":
        forms.append(torch.compile(apply, backend="eager"))
    for call in forms:
        for settings in ({}, {"return_dict": False}):
            with pytest.raises(ValueError, match=r"filled a cache.* use_cache=False"):
                call(params, **inputs, **settings)
        call(params, **inputs, use_cache=False)
    if family == "Llama":
        with pytest.raises(ValueError, match="filled a cache"):
            apply(params, m["input_ids"], None, m["positions"])
    apply(params, **ids)
    apply(params, **inputs, use_cache=True)


@pytest.mark.parametrize("family", ["GPT-2", "LoRA on Llama", "T5"])
def test_a_mask_of_bools_is_refused_by_eager_attention(family: str) -> None:
    """Looks at the config when ``apply`` is called: it is shared, and may change."""
    apply: Any
    module = make_model(family)
    params, apply = ps.from_module(module)
    m = packed(family)
    id_names = {"input_ids", "decoder_input_ids"} & m.keys()
    ids = {name: m[name] for name in id_names}
    mask_name = "decoder_attention_mask" if family == "T5" else "attention_mask"
    bools = ps.segment_mask(m["segments"])
    floats = ps.segment_mask(m["segments"], torch.float64)

    def run(mask: Tensor) -> None:
        apply(params, **ids, **{mask_name: mask})

    run(bools)
    module.set_attn_implementation("eager")
    with pytest.raises(ValueError, match=f"{mask_name} .* eager attention would add"):
        run(bools)
    run(floats)
    # Masks of two dimensions are no such masks, whatever their dtype.
    run(m["attention_mask"].bool())


def test_a_mask_of_bools_by_position_and_for_each_kind_of_layer() -> None:
    module = make_model("Llama", "eager")
    params, apply = ps.from_module(module)
    m = packed()
    mask = ps.segment_mask(m["segments"])
    message = r"^attention_mask .* eager attention would add"
    with pytest.raises(ValueError, match=message):
        apply(params, m["input_ids"], mask)
    masks = {"attention_mask": {"full_attention": mask[:, 0]}}
    models = huggingface.models_of(module)
    with pytest.raises(ValueError, match=message):
        huggingface.check_call(models, (), masks, None)


def test_hidden_states_are_those_of_the_call() -> None:
    """Registers a call's hooks on the call's own objects, also on threads."""
    module = make_model("Llama")
    params, apply = ps.from_module(module)
    ids = torch.arange(4)[None]

    def count_hidden_states(ids: Tensor) -> int:
        output = apply(params, ids, output_hidden_states=True)
        return len(output.hidden_states)

    for _ in range(3):
        assert count_hidden_states(ids) == 3
    assert count_forward_hooks(module) == 0
    on_threads = ps.testing.ThreadAxis(2).map(count_hidden_states)
    assert on_threads([ids, ids + 4]) == [3, 3]
