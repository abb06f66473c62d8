"""Linear layers on stored weights: float, four bits, or FP8 E4M3 with scales of blocks or rows.

Chosen for: every `PRODUCT`, `PRODUCTS`, `UPDATE`, `CODES`, `CODES_PRODUCT`, `CODES_UPDATE` and most
of `ROUTER`: it asks the table. What cuBLAS computes is here.

    weight only   y[m, n] = sum_k x[m, k] * codes[n, k] * scale(n, k)          summed in float32
    dynamic       the same on codes(x) * s(x) of quantize_rows, over 128 columns of a token (block
                  scales) or over the whole token (channel scales): W8A8, as vLLM and SGLang do

Source: DeepSeek-V3 technical report, section 3.3.
Trap: codes and scales have to be multiplied in float32 wherever the weight is read anyway: their
product, rounded to bfloat16, is another weight. From 512 rows on a weight-only product does round
it, as loading the weight decoded would.

Shape letters: M rows of x (tokens), N outputs, K inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.cases import CodesProduct, Inputs, Product, Products
from runtime.kernels.dispatch import (
    CODES,
    CODES_PRODUCT,
    CODES_UPDATE,
    CODES_WITH_ROWS,
    PRODUCT,
    PRODUCTS,
    UPDATE,
)
from runtime.kernels.encode.lined import Lined
from runtime.kernels.encode.rows import (
    MULTIPLE,
    Codes,
    quantize_rows,
    quantize_rows_reference,
)
from runtime.kernels.launch import capability, gluon_runs, use_triton
from runtime.kernels.linear.few import few_heads, few_linear, few_parts, few_products
from runtime.kernels.linear.packed import PackedWeight
from runtime.kernels.linear.packed_roles import nvfp4_parts, nvfp4_rows
from runtime.kernels.linear.packed_stream import packed_row
from runtime.kernels.linear.packed_tiles import packed_linear, unpacked_linear
from runtime.kernels.linear.roles import roles_linear
from runtime.kernels.linear.row import row_linear
from runtime.kernels.linear.rows import (
    coded_parts,
    coded_rows,
    rows_linear,
    rows_parts,
    rows_products,
)
from runtime.kernels.linear.tiles import tile_product
from runtime.kernels.linear.weight import (
    BLOCK,
    Fp8Weight,
    Weight,
    dequant,
    form_of,
    joined_rows,
    linear_fp8_reference,
    product_reference,
    scale_edge,
)
from runtime.kernels.norm.gated import Unscaled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime.kernels.norm.rms import Parts


def linear_fp8_dynamic_reference(x_MK: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Say what `quantised_linear` computes, in plain torch."""
    group = x_MK.shape[1] if scale_edge(codes, scale) == 1 else BLOCK
    x_codes, x_scale = quantize_rows_reference(x_MK, group)
    x = x_codes.float() * x_scale.repeat_interleave(group, 1)[:, : x_MK.shape[1]]
    return linear_fp8_reference(x, codes, scale).to(x_MK.dtype)


def linear_reference(x_MK: Tensor, weight: Weight, batch: int | None = None) -> Tensor:
    """Say what `linear` computes, in plain torch.

    batch  the number of rows that decides about quantising x, where x is part of a larger batch
    """
    if isinstance(weight, Fp8Weight) and weight.quantises(batch or x_MK.shape[0]):
        return linear_fp8_dynamic_reference(x_MK, weight.codes, weight.scale)
    return product_reference(x_MK, weight)


def takes_codes(weight: object, x_MK: Tensor) -> TypeGuard[Fp8Weight]:
    """Return whether whoever makes x writes its codes, in groups of 128 columns, for this weight.

    weight  [N, K] or a stack of them, whatever it is stored in; x need not have K columns
    """
    if not isinstance(weight, Fp8Weight):
        return False
    inputs = Inputs(use_triton(x_MK), x_MK.shape[0], *weight.form, weight.codes.shape[-1])
    return _codes(inputs) is CODES_WITH_ROWS


def takes_lined(weight: object, x_MK: Tensor) -> TypeGuard[PackedWeight]:
    """Return whether whoever makes x lines it up for this weight, [N, K] or a stack of them."""
    if not isinstance(weight, PackedWeight) or len(weight.shape) != 2:
        return False
    return _product(_case(x_MK, weight)) is nvfp4_rows


def codes_for(weight: object, x_MK: Tensor) -> Codes | Lined | None:
    """Return room for what `linear` with this weight takes in place of the rows x, if it does."""
    num_rows, k = x_MK.shape
    if takes_lined(weight, x_MK):
        return Lined.room(num_rows, k, x_MK)
    return Codes.room(num_rows, k, x_MK.device) if takes_codes(weight, x_MK) else None


def linear(x: Tensor, weight: Weight, codes: Codes | Lined | None = None) -> Tensor:
    """Return x @ weight.T [..., N] in x's dtype, whatever the weight is stored in.

    x       [..., K]
    weight  [N, K] in x's dtype, an Fp8Weight or a PackedWeight
    codes   those of x, from room of `codes_for`, if there are any: x is not quantised again
    """
    if x.ndim != 2:
        x_MK = x.reshape(-1, x.shape[-1])
        return linear(x_MK, weight, codes).view(*x.shape[:-1], weight.shape[0])
    if isinstance(codes, Codes) and takes_codes(weight, x):
        return codes_linear(codes, weight, x)
    if isinstance(codes, Lined) and takes_lined(weight, x):
        return nvfp4_rows(x, weight, codes)
    y_MN: Tensor = _product(_case(x, weight))(x, weight)
    return y_MN


def linears(
    x_MK: Tensor, weights: Sequence[Weight], codes: Codes | Lined | None
) -> tuple[Tensor, ...]:
    """Return `linear` of rows x with each of two weights, of which the second one is small."""
    card, coded = capability(x_MK.get_device()), isinstance(codes, Codes)
    joined = joined_rows(*weights) is not None
    case = Products(*_case(x_MK, weights[0])[:5], card, coded, joined)
    products: tuple[Tensor, ...] = _products(case)(x_MK, *weights, codes=codes)
    return products


def joined_linear(
    x_MK: Tensor, *weights: Tensor, codes: Codes | Lined | None
) -> tuple[Tensor, ...]:
    """Return `each_linear` by one product with weights that are one in memory; rows are apart."""
    assert codes is None, "float weights take no codes"
    whole = joined_rows(*weights)
    assert whole is not None, "the weights must follow one another"
    return torch.split(linear(x_MK, whole), [weight.shape[0] for weight in weights], -1)


def each_linear(x_MK: Tensor, *weights: Weight, codes: Codes | Lined | None) -> tuple[Tensor, ...]:
    """Return `linear` of rows x with each weight, one after the other.

    The last one comes first: it is small, and the large one's weights are on their way meanwhile.
    """
    return tuple(linear(x_MK, weight, codes) for weight in reversed(weights))[::-1]


def linear_update(x_MK: Tensor | Unscaled, weight: Weight) -> Tensor | Parts:
    """Return `linear` of rows x, or parts of it where the norm after it adds them.

    x_MK  unscaled only before a small weight of floats, and in 8 rows or fewer
    """
    if isinstance(x_MK, Unscaled):
        assert isinstance(weight, Tensor), "only a product with floats scales x"
        return few_heads(x_MK, weight)
    y: Tensor | Parts = _update(_case(x_MK, weight))(x_MK, weight)
    return y


def lines_up(weight: Weight, x_MK: Tensor) -> bool:
    """Return whether kernels take x lined up for this weight."""
    return isinstance(weight, PackedWeight) and weight.is_nvfp4 and gluon_runs(x_MK.get_device())


def _case(x_MK: Tensor, weight: Weight) -> Product:
    rows, k = x_MK.shape
    lined = lines_up(weight, x_MK)
    return Product(use_triton(x_MK), rows, k, x_MK.dtype, *form_of(weight), lined)


def float_linear(x_MK: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T [M, N] for a weight in x's dtype."""
    return F.linear(x_MK, weight)


def tiled_linear(x_MK: Tensor, weight: Fp8Weight) -> Tensor:
    """Return x @ weight.T [M, N] in x's dtype, x as it is, the weight decoded in registers."""
    _check(x_MK, weight)
    return tile_product(x_MK, None, weight.codes, weight.scale, x_MK.dtype)


def decoded_linear(x_MK: Tensor, weight: Fp8Weight) -> Tensor:
    """Return x @ weight.T [M, N] in x's dtype, the weight decoded and rounded to it before."""
    _check(x_MK, weight)
    return F.linear(x_MK, dequant(weight.codes, weight.scale, x_MK.dtype))


def quantised_linear(x_MK: Tensor, weight: Fp8Weight) -> Tensor:
    """Return x @ weight.T [M, N] in x's dtype with x quantised to E4M3 first (W8A8).

    x_MK  [M, K] float, rows contiguous in themselves; one scale for each token and 128 columns
          (block weights) or for each token (channel weights)
    """
    if not use_triton(x_MK):
        return linear_fp8_dynamic_reference(x_MK, weight.codes, weight.scale)
    return codes_linear(_codes_of(x_MK, weight), weight, x_MK)


def quantised_update(x_MK: Tensor, weight: Fp8Weight) -> Tensor | Parts:
    """Return `quantised_linear`, or parts of it where the norm after it adds them, on a GPU."""
    return codes_update(_codes_of(x_MK, weight), weight, x_MK)


def _codes_of(x_MK: Tensor, weight: Fp8Weight) -> Codes:
    _check(x_MK, weight)
    group = x_MK.shape[1] if weight.edge == 1 else BLOCK
    return quantize_rows(x_MK, group, MULTIPLE)


def codes_linear(codes: Codes, weight: Weight, like: Tensor) -> Tensor:
    """Return what the weight makes of the rows that have these codes, on a GPU.

    codes  from `quantize_rows`, rows in sixteens
    like   as many rows as there are, in the dtype of the product
    """
    assert isinstance(weight, Fp8Weight), "codes are multiplied with FP8 weights"
    y_MN: Tensor = _codes_product(_codes_case(weight, like))(codes, weight, like.dtype)
    return y_MN[: like.shape[0]]


def codes_update(codes: Codes, weight: Weight, like: Tensor) -> Tensor | Parts:
    """Return `codes_linear`, or parts of it where the norm after it adds them."""
    assert isinstance(weight, Fp8Weight), "codes are multiplied with FP8 weights"
    y: Tensor | Parts = _codes_update(_codes_case(weight, like))(codes, weight, like)
    return y


def _codes_case(weight: Fp8Weight, like: Tensor) -> CodesProduct:
    gpu, (n, k), scale = like.get_device(), weight.shape, weight.scale.dtype
    card, gluon, form = capability(gpu), gluon_runs(gpu), weight.form[0]
    return CodesProduct(card, like.shape[0], like.dtype, form, scale, n, k, gluon)


def scaled_mm(x: Codes, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """Return the product of codes with the weight [M, N] by cuBLAS."""
    y_MN: Tensor = torch._scaled_mm(
        x.codes, weight.codes.T, scale_a=x.scale, scale_b=weight.scale.T, out_dtype=dtype
    )
    return y_MN


def tiled_codes(x: Codes, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """Return the product of codes with the weight [M, N] in tiles."""
    return tile_product(x.codes, x.scale, weight.codes, weight.scale, dtype)


def _check(x_MK: Tensor, weight: Fp8Weight) -> None:
    assert x_MK.ndim == weight.codes.ndim == 2, "x and codes must be matrices"
    assert x_MK.shape[1] == weight.shape[1], "x and codes must have the same number of columns"
    assert x_MK.stride(1) == 1, "rows must be contiguous"


_codes = CODES.remembered(CODES.choose)
_codes_product = CODES_PRODUCT.bind(coded_rows, scaled_mm, roles_linear, tiled_codes)
_codes_update = CODES_UPDATE.bind(coded_parts, codes_linear)
_products = PRODUCTS.bind(few_products, rows_products, joined_linear, each_linear)
_update = UPDATE.bind(few_parts, rows_parts, quantised_update, nvfp4_parts, linear)
_product = PRODUCT.bind(
    linear_reference,
    row_linear,
    few_linear,
    packed_row,
    nvfp4_rows,
    packed_linear,
    unpacked_linear,
    rows_linear,
    float_linear,
    tiled_linear,
    decoded_linear,
    quantised_linear,
)
