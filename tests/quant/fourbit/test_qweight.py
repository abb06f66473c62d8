"""The layouts of GPTQ and AWQ: packed as in the libraries, to the byte, and decoded."""

from __future__ import annotations

from hashlib import sha256

import pytest
import torch

from formats.tensor import TensorInfo
from quant.errors import QuantError
from quant.fourbit.columns import groups_of
from quant.fourbit.parts import ORDER, PACKED, SCALE, ZERO
from quant.fourbit.qweights import Qweights
from quant.fourbit.words import one_more, pack_columns, pack_rows, unpack_columns, unpack_rows
from tests import packed

N, K, GROUP = 32, 64, 32
# SHA-256 of the bytes that auto-round 0.16.1 (`qlinear_torch`: zeros; `qlinear_torch_zp`: zeros
# less one; `WQLinear_GEMM`) and gptqmodel 7.7.0 (`pack_original`, in static and in another order)
# make of `sample`. All of them agree.
THEIRS = {
    ("gptq", 4): ("705d9df65b1aa4ed", "2a1a1b86d346f6b6", "0b55cc64f7fc465f"),
    ("gptq_v2", 4): ("705d9df65b1aa4ed", "4349c04324b80e9f", "0b55cc64f7fc465f"),
    ("gptq", 8): ("1982a2fd6674d797", "ba824d5af6576c66", "0b55cc64f7fc465f"),
    ("gptq_v2", 8): ("1982a2fd6674d797", "2fb23d0b647bf2bb", "0b55cc64f7fc465f"),
    ("awq", 4): ("5151120907865d7f", "cd9e853844e5eee0", "0b55cc64f7fc465f"),
}
TYPES = {torch.int32: "I32", torch.float16: "F16", torch.bfloat16: "BF16"}


def sample(bits: int) -> packed.Codes:
    """Return numbers from which packers make what `THEIRS` has the digests of."""
    n, k, g = torch.arange(N)[:, None], torch.arange(K)[None], torch.arange(K // GROUP)[None]
    end = 1 << bits
    codes, zeros = (5 * n + 3 * k + n * k) % end, 1 + (3 * n + 7 * g) % (end - 1)
    steps = (2.0 ** -(5 + n % 3)) * (1 + g * 0.25)
    return packed.Codes(codes, zeros, steps, torch.arange(K) // GROUP, bits)


def stored(kind: str, x: packed.Codes) -> dict[str, torch.Tensor]:
    return packed.awq("x.", x) if kind == "awq" else packed.gptq("x.", x, v2=kind == "gptq_v2")


def block(kind: str, bits: int) -> dict[str, object]:
    if kind == "awq":
        return {"quant_method": "awq", "bits": bits, "group_size": GROUP, "version": "gemm"}
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "checkpoint_format": kind}


def infos_of(tensors):
    return {n: TensorInfo(n, TYPES[t.dtype], tuple(t.shape)) for n, t in tensors.items()}


@pytest.mark.parametrize(("kind", "bits"), THEIRS)
def test_packing_is_theirs_to_the_byte(kind, bits):
    tensors = stored(kind, sample(bits))
    for last, digest in zip(("qweight", "qzeros", "scales"), THEIRS[kind, bits], strict=True):
        data = tensors[f"x.{last}"].numpy().tobytes()
        assert sha256(data).hexdigest().startswith(digest), last


@pytest.mark.parametrize(("kind", "bits"), THEIRS)
def test_rows_decode_to_code_less_zero_times_step(kind, bits):
    x = sample(bits)
    tensors = stored(kind, x)
    (weight,) = Qweights(block(kind, bits)).recognise(infos_of(tensors))
    assert (weight.name, weight.shape) == ("x.weight", (N, K))
    rows = {}
    for part in weight.form.parts(weight.name, weight.shape):
        data = tensors[part.info.name]
        assert part.info.shape == tuple(data.shape)
        data = data.mT if part.transposed else data
        rows[part.key] = part.unpack(data) if part.unpack else data
    assert torch.equal(weight.form.decode(rows).double(), x.values)


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_packed_comes_back(bits):
    end = 1 << (bits - 1)
    codes = torch.randint(-end, end, (16, 64), dtype=torch.int8)
    assert torch.equal(unpack_columns(pack_columns(codes, bits), bits), codes)
    assert torch.equal(unpack_rows(pack_rows(codes, bits), bits), codes)
    assert torch.equal(pack_columns(codes, bits), packed.words(codes.long() + end, bits))


@pytest.mark.parametrize(("bits", "ones"), [(4, 0x11111111), (8, 0x01010101)])
def test_a_zero_point_of_zero_comes_back_as_gptqmodel_has_it(bits, ones):
    """Their version 1 takes one from each zero of a word, with the borrow; theirs adds it back."""
    zeros = torch.randint(-(2**31), 2**31, (4, 64), dtype=torch.int64).to(torch.int32)
    zeros[0] = 0
    assert torch.equal(one_more(zeros - ones, bits), zeros)


def test_columns_of_another_order_are_multiplied_with_their_own_step():
    x = sample(4)
    order = (torch.arange(K) * 7 + 3) % K // GROUP
    x = packed.Codes(x.codes, x.zeros, x.steps, order, 4)
    (weight,) = Qweights(block("gptq", 4)).recognise(infos_of(packed.gptq("x.", x)))
    assert weight.form.ordered
    rows = {
        PACKED: packed.words(x.codes, 4),
        SCALE: x.steps.half(),
        ZERO: (x.zeros - 8).to(torch.int8),
        ORDER: order.to(torch.int32),
    }
    assert torch.equal(weight.form.decode(rows).double(), x.values)
    assert not torch.equal(order, torch.arange(K) // GROUP)


@pytest.mark.parametrize("wrong", [-1, 2])
def test_a_group_that_has_no_step_is_refused(wrong):
    order = torch.arange(K) // GROUP
    order[5] = wrong
    with pytest.raises(QuantError, match=f"column 5 is in group {wrong}"):
        groups_of(order, K, 2)


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("gptq", {"quant_method": None}, "is laid out as GPTQ, but there is no quantization_conf"),
        ("gptq", {"quant_method": "fp8"}, "is laid out as GPTQ, but quantization_config says fp8"),
        ("awq", {"quant_method": "gptq"}, "is laid out as AWQ, but quantization_config says GPTQ"),
        ("gptq", {"bits": 8}, "has 4 bits by its shape, but quantization_config says 8"),
        ("gptq", {"group_size": 128}, "has groups of 32 columns by its shape, but quant"),
        ("gptq", {"dynamic": {"+:x": {"bits": 8}}}, "has 4 bits by its shape, but quantiz"),
        ("gptq", {"extra_config": {"x": {"group_size": -1}}}, "has groups of 32 columns by"),
    ],
)  # fmt: skip
def test_what_the_config_says_otherwise_is_named(kind, changes, says):
    infos, said = infos_of(stored(kind, sample(4))), Qweights(block(kind, 4) | changes)
    assert not [*said.recognise(infos)]
    for name in infos:
        problem = said.explain(name, infos)
        assert problem.tensor == "x.qweight"
        assert problem.problem.startswith(says)


@pytest.mark.parametrize(
    "changes",
    [
        {"bits": 8, "dynamic": {"-:y": {}, "+:.*x": {"bits": 4}}},
        {"group_size": 128, "extra_config": {"x": {"group_size": GROUP}}},
        {"bits": None, "group_size": None},
    ],
)
def test_what_a_module_has_of_its_own_counts(changes):
    said = Qweights(block("gptq", 4) | changes)
    assert [*said.recognise(infos_of(stored("gptq", sample(4))))]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("x.qzeros"), "has no qzeros beside it"),
        (lambda t: t.pop("x.scales"), "has no scales beside it"),
        (lambda t: t.update({"x.qzeros": t["x.qzeros"][:, :3]}), "has 3 bits by the shape of its"),
        (lambda t: t.update({"x.qzeros": t["x.qzeros"][:1]}), "does not fit what stands beside it"),
        (lambda t: t.update({"x.g_idx": t["x.g_idx"][:5]}), "does not fit what stands beside it"),
        (lambda t: t.update({"x.scales": t["x.scales"].int()}), "has scales of type I32"),
        (lambda t: t.update({"x.scales": t["x.scales"][0]}), "is not a matrix"),
    ],
)
def test_parts_that_do_not_fit_are_named(change, says):
    tensors = stored("gptq", sample(4))
    change(tensors)
    said, infos = Qweights(block("gptq", 4)), infos_of(tensors)
    assert not [*said.recognise(infos)]
    assert said.explain("x.qweight", infos).problem.startswith(says)


def test_groups_that_are_promised_must_be_there():
    infos = infos_of(packed.gptq("x.", sample(4), g_idx=False))
    said = Qweights(block("gptq", 4) | {"desc_act": True})
    assert said.explain("x.qweight", infos).problem.startswith("has no g_idx beside it")
    assert [*Qweights(block("gptq", 4)).recognise(infos)]
