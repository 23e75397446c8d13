"""Models of transformers as they come: a step is ``loss.backward()`` on one big batch, and what README.md says of them."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import purestep as ps
from purestep.nn import huggingface
from purestep.testing.bounds import gamma
from tests import families
from tests.families import SETTINGS, WINDOW, Setting, built, looking_back, model
from tests.torch_private import forward_hooks

# Of torch, for flash attention on a CPU under vmap.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")
TRACED = partial(torch.compile, backend="aot_eager")


@pytest.mark.parametrize(
    ("family", "setting"),
    [case for case in families.cases() if "compile" not in SETTINGS[case[1]].step],
)
def test_a_step_is_one_big_batch(family: str, setting: str) -> None:
    error, bound, same_bits = families.measure(family, SETTINGS[setting])
    assert error <= bound
    assert same_bits in (True, None)
    assert bound < torch.inf or same_bits


@pytest.mark.parametrize(
    ("family", "form"), [("Llama", "position_ids"), ("BERT", "2D mask")]
)
def test_compiled_too(family: str, form: Any) -> None:
    """Two whose masks are made of values otherwise, of one microbatch; benchmarks/families.py has all."""
    settings = Setting(form), Setting(form, step={"compile": TRACED})
    group = [families.microbatches(family, settings[0])[0][:1]]
    eager, compiled = (
        families.step_grads(family, setting, group) for setting in settings
    )
    for name, grad in eager.items():
        off = (compiled[name] - grad).norm()
        assert off <= gamma(families.ROUNDINGS, torch.float32) * grad.norm(), name


def packed(family: str = "Llama") -> dict[str, Any]:
    return ps.pack_documents(families.examples(family), row_tokens=families.ROW)


def test_a_microbatch_may_hold_strings_and_its_loss_is_no_mean() -> None:
    params, apply = ps.from_module(model("Llama"))
    (m,) = ps.pack(families.examples("Llama"), max_tokens=100)
    sgd = ps.optim.sgd(0.1)

    def train(loss_fn: Any) -> Any:
        group = [transformers.BatchEncoding({**m, "text": ["a", "b"]})]
        return ps.make_update_step(loss_fn, sgd)(params, sgd.init(params), group)

    def loss_fn(p: Any, m: Any) -> Tensor:
        return ps.losses.cross_entropy(apply(p, m["input_ids"]).logits, m["labels"])

    assert train(loss_fn)[2].num_tokens == (m["labels"] != -100).sum()
    with pytest.raises(ValueError, match="a scalar is most likely a mean"):
        train(lambda p, m: apply(p, m["input_ids"], labels=m["labels"]).loss)
    with pytest.raises(TypeError, match="got CausalLMOutputWithPast"):
        train(lambda p, m: apply(p, m["input_ids"]))


def changed(own: Any, family: str, m: Any, inputs: Mapping[str, Any]) -> float:
    """By how much the loss of texts changes in this microbatch."""
    params, apply = ps.from_module(looking_back(own))

    def total(m: Any, **more: Any) -> Tensor:
        logits = apply(
            params, input_ids=m["input_ids"], **{"use_cache": False, **more}
        ).logits
        return ps.losses.cross_entropy(logits, m["labels"]).sum().detach()

    alone = sum(
        total(ps.pack([text], max_tokens=100)[0]) for text in families.examples(family)
    )
    return float((total(m, **inputs) / alone - 1).abs())


def at(m: Any, **more: Any) -> dict[str, Any]:
    return {"position_ids": m["positions"], **more}


def in_2d(m: Any) -> dict[str, Any]:
    return at(m, attention_mask=m["attention_mask"])


def within(m: Any, window: int | None = None) -> dict[str, Any]:
    return at(m, attention_mask=ps.segment_mask(m["segments"], window=window))


def of_each_kind(m: Any) -> dict[str, Any]:
    kinds = {"full_attention": None, "sliding_attention": WINDOW}
    segments = m["segments"]
    masks = {
        kind: ps.segment_mask(segments, window=window) for kind, window in kinds.items()
    }
    return at(m, attention_mask=masks)


GEMMA3 = partial(
    built, "Gemma3ForCausalLM", head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=8,
    layer_types=["sliding_attention", "full_attention"],
)  # fmt: skip
IN_ONE_ROW: list[tuple[Any, str, Callable[[Any], Any], bool]] = [
    ("Llama", "Llama", at, True),
    ("Llama", "Llama", partial(at, use_cache=True), False),
    ("Llama", "Llama", in_2d, False),
    ("GPT-2", "GPT-2", in_2d, False),
    ("BERT", "BERT", at, False),
    ("Mistral", "Mistral", partial(within, window=WINDOW), True),
    ("Mistral", "Mistral", within, False),
    (GEMMA3, "Llama", at, True),
    (GEMMA3, "Llama", of_each_kind, True),
    (GEMMA3, "Llama", within, False),
    (GEMMA3, "Llama", partial(within, window=WINDOW), False),
]


@pytest.mark.parametrize(("make", "family", "inputs", "right"), IN_ONE_ROW)
def test_documents_in_one_row(make: Any, family: str, inputs: Any, right: bool) -> None:
    """What README.md says of models: the loss of texts is that of each alone, or another, without a word."""
    own = families.FAMILIES[make].make() if isinstance(make, str) else make()
    m = packed(family)
    off = changed(own, family, m, inputs(m))
    assert off < 1e-6 if right else off > 1e-4


@pytest.mark.parametrize("family", ["GPT-2", "Llama", "LoRA on Llama"])
def test_a_cache_joins_packed_documents_and_is_refused(
    family: str, fresh_compiler: None
) -> None:
    apply: Any
    params, apply = ps.from_module(model(family))
    m = packed(family)
    ids, positions = {"input_ids": m["input_ids"]}, {"position_ids": m["positions"]}
    for f in (
        (apply, torch.compile(apply, backend="eager"))
        if family == "Llama"
        else (apply,)
    ):
        for more in ({}, {"return_dict": False}):
            with pytest.raises(ValueError, match=r"filled a cache.* use_cache=False"):
                f(params, **ids, **positions, **more)
        f(params, **ids, **positions, use_cache=False)
    if family == "Llama":
        with pytest.raises(ValueError, match="filled a cache"):
            apply(params, m["input_ids"], None, m["positions"])
    apply(params, **ids)
    apply(params, **ids, **positions, use_cache=True)


@pytest.mark.parametrize("family", ["GPT-2", "LoRA on Llama", "T5"])
def test_a_mask_of_bools_is_refused_by_eager_attention(family: str) -> None:
    """Whatever the config says when ``apply`` is called, which is shared."""
    apply: Any
    own, m = model(family), packed(family)
    params, apply = ps.from_module(own)
    name = "decoder_attention_mask" if family == "T5" else "attention_mask"
    names = {"input_ids", "decoder_input_ids"} & m.keys()
    given, mask = {name: m[name] for name in names}, ps.segment_mask(m["segments"])
    apply(params, **given, **{name: mask})
    own.set_attn_implementation("eager")
    with pytest.raises(ValueError, match=f"{name} .* eager attention would add"):
        apply(params, **given, **{name: mask})
    apply(params, **given, **{name: ps.segment_mask(m["segments"], torch.float64)})
    # Masks of two dimensions are no such masks, whatever their dtype.
    apply(params, **given, **{name: m["attention_mask"].bool()})


def test_a_mask_of_bools_by_position_and_for_each_kind_of_layer() -> None:
    own, m = model("Llama", "eager"), packed()
    params, apply = ps.from_module(own)
    mask = ps.segment_mask(m["segments"])
    with pytest.raises(
        ValueError, match=r"^attention_mask .* eager attention would add"
    ):
        apply(params, m["input_ids"], mask)
    masks = {"attention_mask": {"full_attention": mask[:, 0]}}
    with pytest.raises(
        ValueError, match=r"^attention_mask .* eager attention would add"
    ):
        huggingface.check_call(huggingface.models_of(own), (), masks, None)


def test_hidden_states_are_those_of_the_call() -> None:
    """A call registers hooks, which stay in its own objects."""
    own = model("Llama")
    params, apply = ps.from_module(own)
    ids = torch.arange(4)[None]
    for _ in range(3):
        assert len(apply(params, ids, output_hidden_states=True).hidden_states) == 3
    assert forward_hooks(own) == 0
    axis = ps.testing.ThreadAxis(2)
    count = axis.map(
        lambda ids: len(apply(params, ids, output_hidden_states=True).hidden_states)
    )
    assert count([ids, ids + 4]) == [3, 3]
