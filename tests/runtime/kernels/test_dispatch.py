"""The table is total and disjoint, and chooses what the branches before it chose.

Each `*_before` is what the wrappers decided for themselves before there was a table: their
conditions, with the names that the table has for what they launched.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
from pathlib import Path

import pytest
import torch

from runtime.kernels import conditions, dispatch
from runtime.kernels.cases import (
    FLOAT,
    FP8_BLOCK,
    FP8_CHANNEL,
    INT4,
    NVFP4,
    SEVERAL,
    Added,
    AddedRows,
    ChosenExperts,
    CodesProduct,
    Draw,
    Gated,
    Heads,
    Inputs,
    NormedRow,
    OneToken,
    Product,
    Products,
    Prompt,
    Router,
    Rows,
    RuleOutput,
    Step,
)
from runtime.kernels.choice import NOTHING, Operation, Row, When, entry_point, unless
from runtime.kernels.launch import use_triton
from runtime.kernels.linear.few import few_linear
from runtime.kernels.linear.product import (
    float_linear,
    linear,
    quantised_linear,
    tiled_linear,
)
from runtime.kernels.linear.row import row_linear
from runtime.kernels.linear.weight import BLOCK, Fp8Weight, form_of
from runtime.kernels.waves import fills

KERNELS = Path(dispatch.__file__).parent
BOTH = (False, True)
COUNTS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 255, 256, 511, 512, 8192)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP8 = list(itertools.product((FP8_BLOCK, FP8_CHANNEL), BOTH))
PACKED = (NVFP4, INT4)
STORED = [(FLOAT, False), *FP8, *((form, False) for form in PACKED)]
SCALES = (torch.float32, torch.bfloat16)
# one group; ragged groups; cuBLAS's multiples or not; strips; wide and large, or either
SIZES = [(20, 128), (24, 300), (32, 256), (1100, 1001), (1024, 1024), (40, 2048), (12288, 2048)]
WIDTHS = (128, 1024, 1025, 5120)
SIZES += [(7168, 2047), (34816, 5120), (5120, 17408), (2048, 4096), (4096, 4096)]


def products():
    for gpu, rows, k, dtype, stored in itertools.product(BOTH, COUNTS, WIDTHS, DTYPES, STORED):
        for lined in {False, gpu and stored[0] in PACKED}:
            yield Product(gpu, rows, k, dtype, *stored, lined)


def pairs():
    cards = ((9, 0), (8, 0), (0, 0))
    for gpu, rows, k, dtype, (form, _) in itertools.product(BOTH, COUNTS, WIDTHS, DTYPES, STORED):
        for card, coded, joined in itertools.product(cards, BOTH, (False, form == FLOAT)):
            yield Products(gpu, rows, k, dtype, form, card, coded, joined)


def inputs():
    for gpu, rows, stored, (_, k) in itertools.product(BOTH, COUNTS, [STORED[0], *FP8], SIZES):
        yield Inputs(gpu, rows, *stored, k)


def codes_products():
    cards = ((9, 0), (8, 0), (0, 0))
    for card, rows, dtype, (form, _), scale, size in itertools.product(
        cards, (8, 9, 64, 65, 255, 400, 512), DTYPES, FP8, SCALES, SIZES
    ):
        for gluon in (False, card == (9, 0)):
            yield CodesProduct(card, rows, dtype, form, scale, *size, gluon)


def normed_rows():
    for gpu, (form, _), (n, k) in itertools.product(BOTH, STORED, SIZES):
        yield NormedRow(gpu, form, k, n * k * (2 if form == FLOAT else 1))


def gated():
    forms = (FLOAT, FP8_BLOCK, NVFP4, INT4)
    for gpu, rows, k, dtype, form in itertools.product(BOTH, COUNTS, WIDTHS, DTYPES, forms):
        for n, gluon in itertools.product((384, 7168), (False, gpu)):
            for lined in {False, gluon and form in PACKED}:
                yield Gated(gpu, rows, k, dtype, form, n, gluon, lined)


def experts():
    for gpu, rows, (form, dynamic), hidden, inner in itertools.product(
        BOTH, COUNTS, STORED, (128, 150, 2048), (140, 512, 1152)
    ):
        for gluon in (False, gpu):
            yield ChosenExperts(gpu, rows, form, dynamic, hidden, inner, gluon)


CASES = {
    Rows: lambda: itertools.starmap(
        Rows, itertools.product(BOTH, COUNTS, WIDTHS, (FLOAT, FP8_BLOCK, NVFP4, SEVERAL))
    ),
    Product: products,
    Products: pairs,
    Inputs: inputs,
    CodesProduct: codes_products,
    NormedRow: normed_rows,
    Router: lambda: itertools.starmap(
        Router, itertools.product(BOTH, COUNTS, (8, 256, 257, 7), (2048, 4096, 4097))
    ),
    ChosenExperts: experts,
    OneToken: lambda: itertools.starmap(
        OneToken,
        itertools.product(
            BOTH, BOTH, (FLOAT, FP8_BLOCK, NVFP4, INT4), (2048, 4097), (512, 1025), (8, 9)
        ),
    ),
    Gated: gated,
    AddedRows: lambda: itertools.starmap(
        AddedRows, itertools.product((640, 1024, 3072, 4096, 5120), BOTH, BOTH)
    ),
    Added: lambda: itertools.starmap(Added, normed_rows()),
    Step: lambda: itertools.starmap(
        Step,
        itertools.product(
            BOTH,
            (16, 32, 33, 48, 255, 256, 384, 3072),
            (8, 9),
            (1, 4),
            (1, 3),
            (64, 128),
            (2048, 2049),
            (FLOAT, FP8_BLOCK, SEVERAL),
        ),
    ),
    RuleOutput: lambda: itertools.starmap(RuleOutput, itertools.product(BOTH, (64, 128), BOTH)),
    Draw: lambda: itertools.starmap(Draw, itertools.product(BOTH, (torch.bfloat16, torch.float32))),
    Heads: lambda: itertools.starmap(
        Heads, itertools.product((0, 1, 16, 17, 32, 33, 64, 65), (1, 2, 4, 5), (1, 2, 4), BOTH)
    ),
    Prompt: lambda: itertools.starmap(
        Prompt, itertools.product(BOTH, BOTH, DTYPES, BOTH, (64, 256), (1, 4), (63, 64))
    ),
}


def in_registers(case):
    few = case.rows <= 2 and case.k <= 1024 and case.form == FLOAT
    return case.gpu and (case.rows == 1 or few)


def layer_before(case):
    return "runtime.model.layer_of_few_rows" if in_registers(case) else LAYER_OF_ROWS


LAYER_OF_ROWS = "runtime.model.layer_of_rows"


def quantises(case):
    return case.form != FLOAT and case.dynamic and case.rows > 16


def takes_codes_before(case):
    if case.form == FLOAT or not case.gpu:
        return False
    groups_of_k = -(-case.k // BLOCK) if case.form == FP8_BLOCK else 1
    by_block = groups_of_k > 1 or case.k <= BLOCK
    return quantises(case) and by_block and case.k % BLOCK == 0


def codes_before(case):
    if takes_codes_before(case):
        return "encode.rows.store_codes"
    return "encode.rows.quantize_rows" if quantises(case) else NOTHING


def packed_product_before(case):
    if case.rows == 1:
        return "linear.packed_stream.packed_row"
    if lined(case):
        return "linear.packed_roles.nvfp4_rows"
    decoded = case.rows >= 512 and case.dtype != torch.float32
    return "linear.packed_tiles." + ("unpacked_linear" if decoded else "packed_linear")


def product_before(case):
    if not case.gpu:
        return "linear.product.linear_reference"
    if case.form in PACKED:
        return packed_product_before(case)
    if in_registers(case):
        return "linear.row.row_linear"
    if case.rows <= 8:
        return "linear.few.few_linear"
    if case.form == FLOAT:
        return "linear.rows.rows_linear" if to_64(case) else "linear.product.float_linear"
    if quantises(case):
        return "linear.product.quantised_linear"
    if case.rows >= 512 and case.dtype in (torch.bfloat16, torch.float16):
        return "linear.product.decoded_linear"
    return "linear.product.tiled_linear"


def lined(case):
    return case.gpu and case.lined and 33 <= case.rows <= 64


def several(case):
    return case.gpu and 2 <= case.rows <= 8 and case.form not in PACKED


def to_64(case):
    return case.gpu and case.form == FLOAT and many(case) and case.dtype == torch.bfloat16


def many(case):
    return 9 <= case.rows <= 64


def products_before(case):
    if several(case):
        return "linear.few.few_products"
    coded = case.gpu and many(case) and case.dtype == torch.bfloat16 and case.coded
    if to_64(case) or (coded and case.card == (9, 0)):
        return "linear.rows.rows_products"
    joined = case.gpu and case.joined
    return "linear.product." + ("joined_linear" if joined else "each_linear")


def update_before(case):
    if several(case):
        return "linear.few.few_parts"
    if to_64(case):
        return "linear.rows.rows_parts"
    if lined(case):
        return "linear.packed_roles.nvfp4_parts"
    if case.gpu and quantises(case):
        return "linear.product.quantised_update"
    return "linear.product.linear"


def codes_update_before(case):
    rows = case.card == (9, 0) and many(case)
    return "linear.rows.coded_parts" if rows else "linear.product.codes_linear"


def codes_product_before(case):
    if case.card == (9, 0) and many(case):
        return "linear.rows.coded_rows"
    cublas = (
        case.card == (9, 0)
        and case.dtype == torch.bfloat16
        and case.scale == torch.float32
        and case.n % 16 == 0
        and case.k % (16 if case.form == FP8_CHANNEL else 4 * BLOCK) == 0
    )
    if cublas and by_roles(case):
        return "linear.roles.roles_linear"
    return "linear.product.scaled_mm" if cublas else "linear.product.tiled_codes"


def by_roles(case):
    """Of the sizes only one has tiles for more than a wave, and for but one of larger tiles."""
    form = case.gluon and case.form == FP8_BLOCK
    return form and case.rows in (400, 512) and (case.n, case.k) == (5120, 17408)


def apart(case):
    return case.k >= 2048 and case.nbytes >= 12 << 20


def in_strips(case):
    return case.k <= (4096 if case.nbytes < 6 << 20 else 2048)


def row_products_before(case):
    if not case.gpu:
        return "linear.row.norm_row_linear_reference"
    if case.form in PACKED:
        whole = "linear.packed_strips.packed_strips"
        return whole if in_strips(case) else "linear.packed_stream.packed_normed"
    if not apart(case):
        return "linear.row.normed_within"
    if case.form != FLOAT and case.k <= 2048:
        return "linear.row_strips.strips"
    return "linear.row.normed_before"


def row_norm_before(case):
    before = not case.gpu or case.form in PACKED or apart(case)
    return "norm.rms.rmsnorm" if before else "linear.row_parts.normed"


def row_added_before(case):
    if not case.gpu or case.form not in PACKED:
        return "linear.row.row_linear"
    whole = "linear.packed_strips.packed_strip"
    return whole if in_strips(case) else "linear.packed_stream.packed_row"


def gated_before(case):
    if several(case):
        return "linear." + ("row_gated.row_gated" if in_registers(case) else "few_gated.few_gated")
    if to_64(case):
        return "linear.rows_gated.rows_gated"
    if lined(case):
        return "linear.packed_roles.nvfp4_gated"
    if case.rows != 1 or not case.gpu:
        prompt = case.gluon and case.rows >= 512 and case.form == FLOAT
        whole = case.n % 256 == case.k % 64 == 0 and fills(case.rows, case.n)
        roles = prompt and whole and case.dtype == torch.bfloat16
        return "linear.roles_gated.roles_gated" if roles else "linear.mlp.silu_mul"
    packed = case.form in PACKED
    return "linear.packed_stream.packed_gated" if packed else "linear.row_gated.row_gated"


def added_norm_before(case):
    pieces = case.k in (3072, 5120) and not case.parts and not case.lined
    return "norm.pieces.add_pieces" if pieces else "norm.rms.add_whole"


def router_before(case):
    if case.gpu and 2 <= case.rows <= 8 and case.hidden <= 4096:
        return "moe.router.few_logits"
    if case.rows < 256 or case.experts % 8 == 0 or not case.gpu:
        return "linear.product.linear"
    return "moe.layer.padded_logits"


def experts_before(case):
    if not case.gpu:
        return "moe.layer.moe_experts_reference"
    if case.form in PACKED:
        few = "packed_tokens" if case.rows <= FEW_PACKED else "packed_tiles"
        return "moe.packed." + ("unpacked_pairs" if case.rows >= 4096 else few)
    if case.rows <= 8:
        return "moe.rows.few_pairs"
    quantise, by_block = quantises(case), case.form == FP8_BLOCK
    if quantise and by_block and case.hidden % BLOCK == case.inner % BLOCK == 0:
        roles = case.gluon and case.rows >= 256 and case.inner <= 1024
        return "moe.roles.roles_pairs" if roles else "moe.w8a8.w8a8_pairs"
    return "moe.tiles.tiled_codes" if quantise else "moe.tiles.tiled_pairs"


def one_token_before(case):
    if not case.absorbed or not case.gpu:
        return "moe.layer.moe_block"
    if case.form not in PACKED:
        return "moe.row.routed_row"
    usual = case.top <= 8 and case.hidden <= 4096 and case.inner <= 1024
    return "moe.packed_row.packed_routed_row" if usual else "moe.packed.packed_tokens"


def rule_step_before(case):
    if not case.gpu:
        return "delta_rule.mixed_step.mixed_step_reference"
    unscaled = case.each > 1 and case.rows <= 8 and case.form == FLOAT
    if unscaled and case.head == 128 and case.k <= 2048:
        return "delta_rule.several.several_unscaled"
    if case.group == case.each == 1 and case.states <= 128:
        return "delta_rule.whole.whole_heads"
    if case.each > 1 or case.states < 256:
        return "delta_rule.within.convolved_within"
    return "delta_rule.mixed_step.convolved_before"


def rule_output_before(case):
    if case.decodes or case.head != 128 or not case.takes_codes:
        return "norm.gated.gated_rmsnorm"
    return "norm.gated.gated_rmsnorm_codes"


def attention_before(case):
    few = case.each <= 4 and 0 < case.rows * case.kv_heads <= 64
    if few and not case.prompts:
        return "attention.step.attention_step"
    return "attention.write.norm_rope_write"


def prompts_before(case):
    if not case.gpu or (case.compiled and case.dtype == torch.float32):
        return "attention.reference.attention_prefill_reference"
    heads = case.dtype.itemsize == 2 and case.head == 256 and case.group % 2 == 0
    roles = case.gluon and heads and case.each >= 64
    return "attention.roles.roles_prefill" if roles else "attention.prefill.launch_prefill"


def draw_before(case):
    counted = case.gpu and case.dtype == torch.bfloat16
    return "sample.draw.by_counts" if counted else "sample.draw.by_sort"


def draft_inputs_before(case):
    within = case.gpu and case.rows <= 4 and case.form == FLOAT and case.k <= 2048
    return "draft.inputs." + ("normed_within" if within else "normed_before")


def draft_before(case):
    if not case.gpu:
        return "draft.token.draft_token_reference"
    within = case.form not in PACKED and not apart(case)
    return "draft.token." + ("normed_within" if within else "with_logits")


BEFORE = {
    dispatch.LAYER: layer_before,
    dispatch.CODES: codes_before,
    dispatch.PRODUCT: product_before,
    dispatch.PRODUCTS: products_before,
    dispatch.UPDATE: update_before,
    dispatch.CODES_PRODUCT: codes_product_before,
    dispatch.CODES_UPDATE: codes_update_before,
    dispatch.ROW_PRODUCTS: row_products_before,
    dispatch.ROW_NORM: row_norm_before,
    dispatch.ROW_ADDED: row_added_before,
    dispatch.GATED: gated_before,
    dispatch.ADDED_NORM: added_norm_before,
    dispatch.ROUTER: router_before,
    dispatch.EXPERTS: experts_before,
    dispatch.ONE_TOKEN: one_token_before,
    dispatch.RULE_STEP: rule_step_before,
    dispatch.RULE_OUTPUT: rule_output_before,
    dispatch.ATTENTION: attention_before,
    dispatch.PROMPTS: prompts_before,
    dispatch.DRAFT_INPUTS: draft_inputs_before,
    dispatch.DRAFT: draft_before,
    dispatch.DRAW: draw_before,
}
FEW_PACKED = conditions.A_FEW_TOKENS
each_operation = pytest.mark.parametrize(
    "operation", dispatch.OPERATIONS, ids=lambda operation: operation.name
)


@each_operation
def test_one_row_serves_each_case_and_each_row_has_a_case(operation):
    reached = set()
    for case in CASES[operation.case]():
        rows = [row for row in operation.rows if row.serves(case)]
        assert len(rows) == 1, (case, [row.kernel for row in rows])
        reached.add(rows[0])
    assert reached == set(operation.rows)


@each_operation
def test_the_table_chooses_what_the_branches_before_it_chose(operation):
    for case in CASES[operation.case]():
        assert operation.choose(case).kernel == BEFORE[operation](case), case


def resolved(kernel):
    module, name = kernel.rsplit(".", 1)
    prefix = "" if module.startswith("runtime.") else "runtime.kernels."
    return getattr(importlib.import_module(prefix + module), name)


@each_operation
def test_every_entry_point_is_there_under_its_own_name(operation):
    for row in operation.rows:
        if row.kernel != NOTHING:
            assert entry_point(resolved(row.kernel)) == row.kernel


def test_the_table_has_every_operation_and_is_printed_whole():
    assert set(BEFORE) == set(dispatch.OPERATIONS)
    listed = [x for x in vars(dispatch).values() if isinstance(x, Operation)]
    assert set(listed) == set(dispatch.OPERATIONS)
    text = dispatch.table()
    for operation in dispatch.OPERATIONS:
        assert operation.name in text
        for row in operation.rows:
            assert row.kernel in text
            assert row.why in text


NAMES = {x: name for name, x in vars(dispatch).items() if isinstance(x, Operation)}


def chosen_for(path):
    """Return the operations that the head of a file says it is chosen for."""
    head = inspect.cleandoc(re.match(r'"""(.*?)"""', path.read_text(), re.DOTALL)[1])
    paragraph = re.search(r"^Chosen for: (.*?)(?=\n[A-Z]|\n\n|\Z)", head, re.DOTALL | re.MULTILINE)
    assert paragraph, f"the head of {path} does not say when it is chosen"
    return set(re.findall(r"`([A-Z_]+)`", paragraph[1]))


@pytest.mark.parametrize(
    "path", sorted(KERNELS.glob("*/[a-z]*.py")), ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_the_head_of_a_file_names_the_operations_it_is_chosen_for(path):
    module = f"{path.parent.name}.{path.stem}."
    rows = {
        NAMES[operation]
        for operation in dispatch.OPERATIONS
        for row in operation.rows
        if row.kernel.startswith(module)
    }
    assert rows <= chosen_for(path) <= set(NAMES.values())


def test_a_function_without_a_row_and_a_row_without_a_function_are_refused():
    with pytest.raises(AssertionError, match=r"norm\.rms\.rmsnorm"):
        dispatch.ROW_NORM.bind(resolved("linear.row_parts.normed"))
    with pytest.raises(AssertionError, match="silu_mul"):
        dispatch.ROW_NORM.bind(*(resolved(row.kernel) for row in dispatch.GATED.rows))


def test_conditions_say_what_they_hold():
    odd = When("odd", lambda case: case % 2 == 1)
    large = When("large", lambda case: case > 5)
    neither = unless(odd, large)
    assert neither.text == "not (odd and large)"
    assert [neither.holds(x) for x in (1, 6, 7)] == [True, True, False]
    assert Row("a", (odd, large), "").serves(7)
    assert not Row("a", (odd, large), "").serves(3)


def test_a_choice_is_made_once_until_a_threshold_moves(thresholds):
    asked = []
    find = dispatch.LAYER.remembered(lambda case: asked.append(case) or dispatch.LAYER.choose(case))
    case = Rows(gpu=True, rows=1, k=128, form=FLOAT)
    assert find(case) is find(case._replace()) is dispatch.LAYER.rows[0]
    assert asked == [case]
    thresholds(FEW_TOKENS=7)
    assert find(case) is dispatch.LAYER.rows[0]
    assert asked == [case] * 2
    sizes = {"hidden": 128, "inner": 128, "gluon": False}
    experts = ChosenExperts(gpu=True, rows=8, form=FLOAT, dynamic=False, **sizes)
    assert dispatch.EXPERTS.choose(experts).kernel == "moe.tiles.tiled_pairs"


def test_a_weight_says_how_it_is_stored():
    codes = torch.zeros(24, 300).to(torch.float8_e4m3fn)
    assert form_of(torch.zeros(24, 300)) == (FLOAT, False)
    assert form_of(Fp8Weight(codes, torch.ones(1, 3), dynamic=True)) == (FP8_BLOCK, True)
    assert form_of(Fp8Weight(codes, torch.ones(24, 1))) == (FP8_CHANNEL, False)


@pytest.mark.parametrize(
    ("rows", "stored", "kernel"),
    [
        (1, "float", row_linear),
        (1, "block", row_linear),
        (2, "float", row_linear),
        (3, "float", few_linear),
        (2, "block", few_linear),
        (8, "channel", few_linear),
        (9, "float", float_linear),
        (9, "channel", tiled_linear),
        (17, "block", tiled_linear),
        (17, "dynamic", quantised_linear),
    ],
)
def test_linear_runs_what_the_table_names(rows, stored, kernel, interpreter):
    generator = torch.Generator().manual_seed(rows)
    x, w = torch.randn(rows, 140, generator=generator), torch.randn(20, 140, generator=generator)
    if stored != "float":
        scale = torch.ones(20, 1) if stored == "channel" else torch.ones(1, 2)
        w = Fp8Weight(w.to(torch.float8_e4m3fn), scale, dynamic=stored == "dynamic")
    case = Product(use_triton(x), *x.shape, x.dtype, *form_of(w))
    assert dispatch.PRODUCT.choose(case).kernel == entry_point(kernel)
    assert torch.equal(linear(x, w), kernel(x, w))
