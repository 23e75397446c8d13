"""What examples are filled up with: the value that was asked for, or an error that names the leaf."""

from functools import partial

import pytest
import torch
from hypothesis import given, strategies as st

import purestep as ps

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64]


@given(
    st.sampled_from([torch.bool, *INTEGERS, torch.float16, torch.bfloat16, torch.float32]),
    st.sampled_from([-100, 0, 1, True, 255, 256, -129, 0.5, 70000, 2**40, 1e39])
    | st.sampled_from([float("inf"), float("nan"), 2**53 + 1]),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_padding_is_what_was_asked_for(
    dtype: torch.dtype, value: float, lengths: list[int]
) -> None:
    """Or it is refused by the leaf's name, even where nothing has to be padded today."""
    examples = [{"a": {"labels": [torch.zeros(n).to(dtype)]}} for n in lengths]
    wanted = torch.tensor(value, dtype=torch.float64)
    if dtype.is_floating_point:
        held = bool(wanted.to(dtype).isfinite() | ~wanted.isfinite())
    else:
        low, high = 0, 1
        if dtype != torch.bool:
            low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        held = float(value).is_integer() and low <= value <= high and int(float(value)) == value
    for pad in (value, {"labels": value}):
        for together in (
            lambda pad=pad: ps.pack(examples, max_tokens=99, multiple_of=5, pad=pad)[0],
            lambda pad=pad: ps.pack_documents(examples, row_tokens=13, pad=pad),
        ):
            if not held:
                with pytest.raises(ValueError, match=r"\['a'\]\['labels'\]\[0\] would be"):
                    together()
                continue
            made = together()
            filled = made["a"]["labels"][0][:, -1].double()
            added = made.get("segments", torch.ones(1)) == 0
            assert not made.get("positions", added)[added].any()
            expected = wanted.to(dtype).double().expand_as(filled)
            assert torch.equal(filled.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_padding_that_rounds(dtype: torch.dtype) -> None:
    """-100 is -96 in eight bits, which is a label like any other."""
    examples = [{"labels": torch.ones(n).to(dtype)} for n in (3, 1)]
    with pytest.raises(ValueError, match=r"padded with -100, which torch.float8.* cannot hold"):
        ps.pack(examples, max_tokens=8)
    (packed,) = ps.pack(examples, max_tokens=8, pad={"labels": -96})
    assert packed["labels"].double().tolist() == [[1, 1, 1], [1, -96, -96]]


def test_pack_refuses_to_guess_a_padding() -> None:
    examples = [{"x": torch.ones(2, 3)}, {"x": torch.ones(1, 3)}]
    uneven = [{"x": torch.ones(2), "y": torch.ones(3)}]
    for run, message in {
        partial(ps.pack, examples, max_tokens=8): r"no pad value for example\['x'\]: add it to",
        partial(ps.pack, [{"x": [1]}], max_tokens=8): r"\['x'\]\[0\] int.*make tensors of them",
        partial(ps.pack, uneven, max_tokens=8): r"examples\[0\] need one common first dimension",
        partial(ps.pack, examples, max_tokens=0): "max_tokens=0 and .* must be at least 1",
    }.items():
        with pytest.raises(ValueError, match=message):
            run()
    (packed,) = ps.pack(examples, max_tokens=8, pad=-1.0)
    assert packed["x"].tolist() == [[[1.0] * 3] * 2, [[1.0] * 3, [-1.0] * 3]]


def test_what_hugging_face_models_take_is_padded() -> None:
    names = ["input_ids", "attention_mask", "position_ids", "token_type_ids"]
    names += ["decoder_input_ids", "decoder_attention_mask"]
    texts = [{name: torch.ones(n, dtype=torch.int64) for name in names} for n in (3, 2)]
    (packed,) = ps.pack(texts, max_tokens=6)
    assert all(packed[name].tolist() == [[1, 1, 1], [1, 1, 0]] for name in names)
