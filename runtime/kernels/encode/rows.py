"""Activations in FP8 E4M3 with one scale for each group of columns of a row.

Chosen for: `CODES`, alone or within the kernel that makes the rows.

    s = amax(group) / 448  (1 where that is zero)      codes = round_to_e4m3(x / s)

Source: DeepSeek-V3 technical report, section 3.3, groups of 128; compressed-tensors "token" is the
same with the whole row as its group.
Trap: x * (1 / s) is not x / s: about 4 of 10,000 codes differ. Both divisions here round to
nearest, so that the kernel and torch give the same codes.

Shape letters: M rows (tokens), K columns, G groups of a row, g columns of a group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import pad

from runtime.kernels.cases import GROUP
from runtime.kernels.encode.lined import Lined, place
from runtime.kernels.launch import INTERPRET, jit, power_of_two, tl, use_triton
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_CODE = 448.0
MULTIPLE = 16  # of rows, which the tensor cores ask for


class Codes(NamedTuple):
    """What `quantize_rows` makes of rows [M, K].

    codes  [M, K] float8_e4m3fn, M possibly rounded up: what the further rows hold is not defined
    scale  [M, G] float32, never zero; on a GPU its columns are contiguous
    """

    codes: Tensor
    scale: Tensor

    @staticmethod
    def room(num_rows: int, columns: int, device: torch.device, multiple: int = MULTIPLE) -> Codes:
        """Return room for groups of 128, which a kernel that makes the rows fills.

        columns   a multiple of 128
        multiple  M is rounded up to it
        """
        assert columns % GROUP == 0, "columns must come in groups of 128"
        height = -(-num_rows // multiple) * multiple
        codes = torch.empty((height, columns), dtype=torch.float8_e4m3fn, device=device)
        scale_GM = torch.empty((columns // GROUP, height), dtype=torch.float32, device=device)
        return Codes(codes, scale_GM.T)


def room_of(codes: Codes | Lined | None, x_MK: Tensor) -> tuple[Any, ...]:
    """Return the arguments of `store_codes` that say where codes of x go, None for nowhere."""
    if codes is None:
        return None, None, 0
    if isinstance(codes, Lined):
        assert codes.values.shape[0] == x_MK.shape[0], "each row of x needs room"
        return codes.values, None, codes.values.stride(0)
    assert codes.codes.shape[1] == x_MK.shape[1], "x and its codes must have one width"
    assert codes.codes.shape[0] >= x_MK.shape[0], "each row of x needs room for its codes"
    return *codes, codes.scale.stride(1)


def quantize_rows_reference(x_MK: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Say what `quantize_rows` computes, in plain torch."""
    m, k = x_MK.shape
    num_groups = -(-k // group)
    x_MGg = pad(x_MK.float(), (0, num_groups * group - k)).view(m, num_groups, group)
    # by a tensor: by a number, CUDA multiplies with its reciprocal, one ulp off
    amax = x_MGg.abs().amax(-1)
    scale = amax / torch.full_like(amax, LARGEST_CODE)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    codes = (x_MGg / scale[..., None]).clamp(-LARGEST_CODE, LARGEST_CODE)
    return codes.to(torch.float8_e4m3fn).view(m, -1)[:, :k].contiguous(), scale


def quantize_rows(x_MK: Tensor, group: int, multiple: int = 1) -> Codes:
    """Return (codes, scale): each `group` columns of each row in E4M3 with a scale amax / 448.

    x_MK      [M, K] float, rows contiguous in themselves; K need not be a multiple of `group`
    multiple  on a GPU M is rounded up to it; what the further rows hold is not defined
    codes     [M, K] float8_e4m3fn
    scale     [M, ceil(K/group)] float32, never zero; on a GPU its columns are contiguous
    """
    assert x_MK.stride(1) == 1, "rows must be contiguous"
    if not use_triton(x_MK):
        return Codes(*quantize_rows_reference(x_MK, group))
    m, k = x_MK.shape
    num_groups, cols, height = -(-k // group), power_of_two(group), -(-m // multiple) * multiple
    codes = torch.empty((height, k), dtype=torch.float8_e4m3fn, device=x_MK.device)
    scale_GM = torch.empty((num_groups, height), dtype=torch.float32, device=x_MK.device)
    rows = max(1, 4096 // cols)
    _quantize_rows_kernel[(-(-m // rows), num_groups)](
        x_MK,
        codes,
        scale_GM,
        m,
        k,
        x_MK.stride(0),
        height,
        GROUP=group,
        ROWS=rows,
        COLS=cols,
        num_warps=8 if cols > 4096 else 4,
        **early(),
    )
    return Codes(codes, scale_GM.T)


@jit
def _divided(x_MK, s_M):
    """Return x / s rounded to nearest, by one division a row: the remainder mends the product.

    Source: Markstein 1990, theorem 8.5. Scales near the end of float32 are first lifted from it.
    """
    if INTERPRET:  # its fma rounds twice
        return tl.div_rn(x_MK, s_M[:, None])
    lift = tl.where(s_M < 2.0**-60, 2.0**64, 1.0)
    s_M *= lift
    x_MK *= lift[:, None]
    inverse = tl.div_rn(1.0, s_M)[:, None]
    q_MK = x_MK * inverse
    return tl.fma(tl.fma(-q_MK, s_M[:, None], x_MK), inverse, q_MK)


@jit
def quantized(x_MK, codes):
    """Return (codes of the type that `codes` points to, scale) of rows of one group, in float32."""
    s = tl.div_rn(tl.max(tl.abs(x_MK), 1), 448.0)
    s = tl.where(s > 0, s, 1.0)
    scaled = _divided(x_MK, s)
    if INTERPRET:  # a GPU's conversion cuts off itself
        scaled = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
    return scaled.to(codes.dtype.element_ty), s


@jit
def store_codes(x_K, codes, scale, height, m, K, BLOCK: tl.constexpr, LINED: tl.constexpr):
    """Store what `quantize_rows` makes of row m in groups of 128; where codes is None, nothing.

    x_K     float32 numbers of the model dtype, zero beyond K; K and BLOCK multiples of 128
    height  rows for which there is room
    LINED   instead the row is lined up in `codes`, whose rows are `height` apart
    """
    if LINED:
        k = tl.arange(0, BLOCK)
        at = codes + m * height + place(k)
        tl.store(at, x_K.to(codes.dtype.element_ty), mask=k < K)
    elif codes is not None:
        i, g = tl.arange(0, BLOCK), tl.arange(0, BLOCK // 128)
        q_Gg, s_G = quantized(tl.reshape(x_K, (BLOCK // 128, 128)), codes)
        tl.store(codes + m * K + i, tl.reshape(q_Gg, (BLOCK,)), mask=i < K)
        tl.store(scale + g.to(tl.int64) * height + m, s_G, mask=g < K // 128)


@jit
def _quantize_rows_kernel(
    x,
    codes,
    scale,
    M,
    K,
    x_row,
    height,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    start_next()
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, COLS)
    k = tl.program_id(1) * GROUP + i
    inside = (m < M)[:, None] & ((i < GROUP) & (k < K))[None, :]
    rows = m.to(tl.int64)[:, None]
    wait_for_inputs()
    x_MK = tl.load(x + rows * x_row + k[None, :], mask=inside, other=0.0).to(tl.float32)
    q, s = quantized(x_MK, codes)
    tl.store(codes + rows * K + k[None, :], q, mask=inside)
    tl.store(scale + tl.program_id(1) * height + m, s, mask=m < M)
