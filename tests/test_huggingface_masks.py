"""Masks that a model of transformers would misread, under eager attention or under a transform, are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep.modules import huggingface
from tests.families import FAMILIES, examples, model
from tests.texts import WRONG, packed

# Of torch, for flash attention on a CPU under vmap.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


def test_masks_of_bools_by_position_and_for_each_kind_of_layer() -> None:
    own = model("Llama", "eager")
    params, apply = ps.from_module(own)
    m = packed()[0]
    ids, mask = m["input_ids"], ps.segment_mask(m["segments"])
    with pytest.raises(ValueError, match=r"^attention_mask .* eager attention would add"):
        apply(params, ids, mask)
    masks = {"attention_mask": {"full_attention": mask}}
    with pytest.raises(ValueError, match=r"^attention_mask .* eager attention would add"):
        huggingface.check_call(huggingface.models_of(own), (), masks, None)
    apply(params, ids, ps.segment_mask(m["segments"], torch.float64))


@pytest.mark.parametrize("family", ["GPT-2", "Llama", "LoRA on Llama", "BERT", "T5"])
def test_a_mask_of_bools_is_refused_by_eager_attention(family: str) -> None:
    own = model(family, "eager")
    params, apply = ps.from_module(own)
    m = packed(family)[0]
    name = "decoder_attention_mask" if family == "T5" else "attention_mask"
    given = {"input_ids": m["input_ids"], name: ps.segment_mask(m["segments"])}
    if family == "T5":
        given["decoder_input_ids"] = m["decoder_input_ids"]
    with pytest.raises(ValueError, match=f"{name} .* eager attention would add"):
        apply(params, **given)
    # It would have been: other logits than those of the mask to be added.
    added = own(**{**given, name: ps.segment_mask(m["segments"], torch.float64)}).logits
    assert (own(**given).logits - added).abs().max() > WRONG
    # Masks of two dimensions are no such masks, whatever their dtype.
    apply(params, **{**given, name: m["attention_mask"].bool()})


@pytest.mark.parametrize("family", [*FAMILIES])
def test_a_2d_mask_under_vmap_is_refused(family: str) -> None:
    if FAMILIES[family].window:
        return  # A window is in every mask, so that nothing is looked at.
    params, apply = ps.from_module(model(family))
    m = ps.pack(examples(family)[:2], max_tokens=100)[0]
    given = {key: value for key, value in m.items() if key != "labels"}

    def logits(given: Any) -> Tensor:
        batch = {key: value[None] for key, value in given.items()}
        return apply(params, **batch).logits

    with pytest.raises(RuntimeError, match="data-dependent control flow"):  # torch's own words
        torch.vmap(logits)(given)


def test_positions_alone_under_vmap_are_refused() -> None:
    params, apply = ps.from_module(model("Llama"))
    m = packed()[0]
    with pytest.raises(RuntimeError, match="data-dependent control flow"):
        torch.vmap(
            lambda ids, at: apply(params, ids[None], position_ids=at[None], use_cache=False).logits
        )(m["input_ids"], m["positions"])


def test_the_config_is_shared() -> None:
    own = model("Llama", "sdpa")
    params, apply = ps.from_module(own)
    mask = ps.segment_mask(torch.ones(1, 4))
    apply(params, torch.arange(4)[None], mask)
    own.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="eager attention would add"):
        apply(params, torch.arange(4)[None], attention_mask=mask)


def test_the_lowest_number_of_float64_is_infinite_to_eager_attention() -> None:
    (m,) = ps.pack(examples("Mistral"), max_tokens=100)
    given = {key: m[key] for key in ("input_ids", "attention_mask")}
    assert model("Mistral", "eager")(**given).logits.isnan().any()
    assert model("Mistral", "eager", dtype=torch.float32)(**given).logits.isfinite().all()
    assert model("Mistral")(**given).logits.isfinite().all()
