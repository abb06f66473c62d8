"""Schemes: what they announce is what they write, and what they refuse is said why."""

import subprocess
import sys
from itertools import pairwise

import pytest
import torch

from formats.tensor import TensorInfo
from quant.choices import Choices
from quant.errors import QuantError
from quant.fp8 import cpu as fp8_cpu
from quant.fp8 import reference as fp8
from quant.fp8.form import CODES, SCALE
from quant.registry import SCHEMES, get_scheme, get_schemes
from quant.stored import each_row

TORCH_TYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
}
FLOAT = Choices("float32")
FP8 = ("fp8-block", "fp8-channel")


def random_weight(n, k, seed=0):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("scale", ["pow2", "float32", "bfloat16"])
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("shape", [(256, 384), (130, 131), (1, 1)])
def test_what_is_announced_is_written(name, scale, shape):
    scheme, w = get_scheme(name, Choices(scale)), random_weight(*shape)
    if name not in FP8 and scheme.refuses(shape):
        return
    written = scheme.encode(w, scheme.prepare(iter([w])))
    parts = scheme.parts("w", shape)
    announced = {
        part.key: part.info for part in parts if part.constant is None and not part.measured
    }
    assert list(written) == list(announced)
    assert parts[0].info.name.startswith("w")
    for key, tensor in written.items():
        assert tensor.shape == announced[key].shape
        assert tensor.dtype == TORCH_TYPES[announced[key].dtype]


def test_names_types_and_grids_are_those_of_the_official_files():
    infos = [part.info for part in get_scheme("fp8-block").parts("w", (256, 130, 300))]
    assert infos == [
        TensorInfo("w", "F8_E4M3", (256, 130, 300)),
        TensorInfo("w_scale_inv", "BF16", (256, 2, 3)),
    ]
    infos = [part.info for part in get_scheme("fp8-channel", FLOAT).parts("w", (256, 130, 300))]
    assert infos == [
        TensorInfo("w", "F8_E4M3", (256, 130, 300)),
        TensorInfo("w_scale", "F32", (256, 130, 1)),
    ]


def test_only_the_scales_of_blocks_change_their_name_beside_others():
    for scheme in get_schemes(["fp8-block", "fp8-channel"]).values():
        assert scheme.parts("w", (128, 128))[1].info.name == "w_scale"
    (alone,) = get_schemes(["fp8-channel"]).values()
    assert alone.parts("w", (128, 128))[1].info.name == "w_scale"


@pytest.mark.parametrize("name", FP8)
def test_rows_may_be_encoded_in_ranges(name):
    scheme, w = get_scheme(name), random_weight(300, 200)
    cuts = [0, scheme.row_multiple, 2 * scheme.row_multiple, 300]
    parts = [scheme.encode(w[a:b]) for a, b in pairwise(cuts)]
    for suffix, tensor in scheme.encode(w).items():
        joined = torch.cat([part[suffix] for part in parts])
        assert torch.equal(joined.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("name", FP8)
def test_the_error_is_that_of_reading_back(name):
    scheme, w = get_scheme(name), random_weight(256, 200)
    rows = each_row(scheme, scheme.encode(w), (256, 200))
    error, decoded = scheme.compare(w, rows), scheme.decode(rows)
    assert 0.02 < error.relative_rms < 2.0**-4
    assert decoded.dtype == torch.float32
    assert error.max_abs == (w.float() - decoded).abs().max()


@pytest.mark.parametrize("arithmetic", [fp8, fp8_cpu])
def test_codes_go_into_the_memory_that_is_given(arithmetic):
    w, out = random_weight(130, 70), torch.empty(130, 70, dtype=torch.float8_e4m3fn)
    codes, _ = arithmetic.quantize(w, (128, 128), "pow2", out)
    assert codes.data_ptr() == out.data_ptr()
    assert torch.equal(out.float(), fp8.quantize(w, (128, 128), "pow2")[0].float())


def test_on_another_device_the_definition_is_taken():
    codes = torch.empty(256, 256, device="meta", dtype=torch.float8_e4m3fn)
    scale = torch.empty(256, 2, device="meta")
    decoded = get_scheme("fp8-block").decode({CODES: codes, SCALE: scale})
    assert decoded.device.type == "meta"
    assert decoded.dtype == fp8.dequantize(codes, scale, (1, 128)).dtype


BLOCKS_NEED = "128x128 blocks need rows and columns divisible by 128, it has "
KERNELS_NEED = "FP8 kernels need rows and columns divisible by 16, it has "
MATRIX = "FP8 needs a matrix or a stack of them, its shape is "


@pytest.mark.parametrize(
    ("name", "shape", "phrase"),
    [
        ("fp8-block", (256, 512, 128), None),
        ("fp8-channel", (16, 48), None),
        ("fp8-block", (160, 128), BLOCKS_NEED + "160 rows"),
        ("fp8-block", (128, 64), BLOCKS_NEED + "64 columns"),
        ("fp8-channel", (8, 24), KERNELS_NEED + "8 rows and 24 columns"),
        ("fp8-block", (128,), MATRIX + "[128]"),
        ("fp8-channel", (128, 1, 4, 1), MATRIX + "[128, 1, 4, 1]"),
    ],
)
def test_shapes_that_no_loader_takes_are_refused_in_words(name, shape, phrase):
    assert get_scheme(name).refuses(shape) == phrase


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fp8-blok",), "scheme 'fp8-blok' is not known, did you mean 'fp8-block'?"),
        (("int5",), "scheme 'int5' is not known, did you mean 'int8'?"),
        (
            ("fp8-block", Choices("pow3")),
            "scale 'pow3' is not known, expected pow2, float32 or bfloat16",
        ),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(arguments, message):
    with pytest.raises(QuantError) as refusal:
        get_scheme(*arguments)
    assert str(refusal.value) == message


@pytest.mark.parametrize("name", SCHEMES)
def test_a_weight_with_a_nan_is_refused(name):
    w, scheme = random_weight(64, 128), get_scheme(name)
    w[5, 6] = float("nan")
    with pytest.raises(QuantError, match=r"1 of 8192 weights .* first at \[5, 6\]"):
        scheme.encode(w, scheme.prepare(iter([w])))


def test_planning_imports_neither_torch_nor_numba():
    code = (
        "import sys, quant.policy, quant.measure, quant.registry\n"
        "quant.registry.get_scheme('fp8-block').refuses((1, 2))\n"
        "sys.exit(bool({'torch', 'numba'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
