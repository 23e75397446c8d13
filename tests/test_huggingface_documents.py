"""Models of transformers on packed documents: what keeps these apart, and what does not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import purestep as ps
from tests.families import FAMILIES, ROTARY, WINDOW, examples, model
from tests.texts import RIGHT, WRONG, Inputs, off, packed, padded


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("T5", "BERT")])
def test_a_cache_joins_packed_documents_and_is_refused(family: str) -> None:
    def inputs(m: Any, **more: Any) -> dict[str, Any]:
        return {"input_ids": m["input_ids"], "position_ids": m["positions"], **more}

    with pytest.raises(ValueError, match="use_cache=False"):
        off(family, packed(family), inputs)
    # Asked for, it is given.
    assert off(family, packed(family), functools.partial(inputs, use_cache=True)) > WRONG


@pytest.mark.parametrize("more", [{}, {"return_dict": False}], ids=str)
def test_a_cache_is_refused_by_position_and_where_it_is_compiled(more: Any) -> None:
    params, apply = ps.from_module(model("Llama"))
    m = packed()[0]
    ids, at = m["input_ids"], m["positions"]
    for f in (apply, torch.compile(apply, backend="eager")):
        with pytest.raises(ValueError, match="filled a cache"):
            f(params, ids, None, at, **more)
        f(params, ids, None, at, use_cache=False, **more)


def test_a_cache_that_the_config_leaves_out() -> None:
    own = model("Llama")
    own.config.use_cache = False
    _, apply = ps.from_module(own)
    ids = torch.arange(4)[None]
    assert apply(dict(own.named_parameters()), ids, position_ids=ids).past_key_values is None


def test_without_packed_documents_a_cache_changes_nothing() -> None:
    inputs = ("input_ids", "attention_mask")
    assert off("Llama", padded(), lambda m: {key: m[key] for key in inputs}) < RIGHT


@pytest.mark.parametrize("family", ["GPT-2", "Llama"])
def test_a_2d_mask_joins_packed_documents(family: str) -> None:
    def inputs(m: Any) -> dict[str, Any]:
        given = {"input_ids": m["input_ids"], "attention_mask": m["attention_mask"]}
        return {**given, "position_ids": m["positions"], "use_cache": False}

    assert off(family, packed(family), inputs) > WRONG


def test_positions_do_not_keep_an_encoders_documents_apart() -> None:
    def inputs(m: Any) -> dict[str, Any]:
        return {"input_ids": m["input_ids"], "position_ids": m["positions"]}

    assert off("BERT", packed("BERT"), inputs) > WRONG


def test_a_4d_mask_brings_its_own_window() -> None:
    def inputs(m: Any, window: int | None) -> dict[str, Any]:
        mask = ps.segment_mask(m["segments"], window=window)
        return {
            "input_ids": m["input_ids"],
            "position_ids": m["positions"],
            "attention_mask": mask,
            "use_cache": False,
        }

    group = packed("Mistral")
    assert off("Mistral", group, functools.partial(inputs, window=WINDOW)) < RIGHT
    assert off("Mistral", group, functools.partial(inputs, window=None)) > WRONG


def shifted_by_company(own: nn.Module, inputs: Inputs) -> float:
    """By how much the loss of texts changes when they share a row."""
    params, apply = ps.from_module(own.train())

    def total(batch: Any, more: dict[str, Any]) -> Tensor:
        logits = apply(params, input_ids=batch["input_ids"], use_cache=False, **more).logits
        return ps.losses.cross_entropy(logits, batch["labels"]).sum().detach()

    alone = sum(total(ps.pack([text], max_tokens=100)[0], {}) for text in examples("Llama"))
    (row,) = packed()
    return float((total(row, inputs(row)) / alone - 1).abs())


def of_segments(m: Any) -> dict[str, Any]:
    return {"position_ids": m["positions"], "attention_mask": ps.segment_mask(m["segments"])}


def of_positions(m: Any) -> dict[str, Any]:
    return {"position_ids": m["positions"]}


def drawn(make: Callable[[], nn.Module]) -> nn.Module:
    """With weights that are not too small for a model to look beyond the last token."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        own = make()
        for parameter in own.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.3)
        return own.to(torch.float64)


def test_some_decoders_do_not_read_documents_from_positions() -> None:
    config = transformers.OPTConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32,
        max_position_embeddings=32, word_embed_proj_dim=16, dropout=0.0,
    )  # fmt: skip
    own = drawn(lambda: transformers.OPTForCausalLM(config))
    assert shifted_by_company(own, of_positions) > WRONG
    assert shifted_by_company(own, of_segments) < RIGHT


def test_layers_that_differ_take_a_mask_each() -> None:
    config = transformers.Gemma3TextConfig(
        **ROTARY, head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    own = drawn(lambda: transformers.Gemma3ForCausalLM(config))

    def of_each_kind(m: Any) -> dict[str, Any]:
        segments = m["segments"]
        masks = {
            "full_attention": ps.segment_mask(segments),
            "sliding_attention": ps.segment_mask(segments, window=WINDOW),
        }
        return {"position_ids": m["positions"], "attention_mask": masks}

    def of_one_window(m: Any) -> dict[str, Any]:
        mask = ps.segment_mask(m["segments"], window=WINDOW)
        return {"position_ids": m["positions"], "attention_mask": mask}

    # Its norms are computed in float32.
    assert shifted_by_company(own, of_each_kind) < 1e-6
    assert shifted_by_company(own, of_positions) < 1e-6
    assert shifted_by_company(own, of_segments) > 1e-4
    assert shifted_by_company(own, of_one_window) > 1e-4


def test_a_state_flows_from_document_to_document() -> None:
    config = transformers.BambaConfig(
        **ROTARY, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=8, mamba_d_state=4,
        mamba_chunk_size=4, mamba_n_groups=1,
    )  # fmt: skip
    own = drawn(lambda: transformers.BambaForCausalLM(config))
    assert shifted_by_company(own, of_segments) > WRONG
