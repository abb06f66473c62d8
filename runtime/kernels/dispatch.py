"""Which kernel runs when: the one table of `runtime.kernels`. Its conditions: see conditions.

Read this first. An operation is something a layer needs. Each of its rows names an entry point, the
cases it serves, and why. The rows of an operation are disjoint and cover every case, so their order
means nothing. `python -m runtime.kernels.dispatch` prints the table.

Code that needs an operation binds its functions to the rows. A function without a row, or a row
without a function, fails at import. For each call the code describes the case in plain numbers:

    _product = PRODUCT.bind(row_linear, float_linear, ...)
    y = _product(Product(...))(x, weight)

A choice is remembered (`choice`), so that the next one of the same case is a look-up. The replay of
a CUDA graph chooses nothing.

What is not chosen here:

- Reference or kernel: without a GPU every wrapper runs its reference (`launch.use_triton`). A
  reference has a row only where it replaces several kernels.
- Operations with one kernel: rope, prompts through the convolution and the delta rule, routing,
  sorting and summing pairs, the encoders. The head of each file says what it is for.
- Block sizes, warps and stages of one kernel: they are in its file, beside their measurements.
- Whether the shared expert is one of the stack: `runtime.load` decides it by the shapes.

Times are microseconds on an H100, from benchmarks/results/kernels.jsonl, unless a unit is named;
those of whole models are from benchmarks/README.md.
"""

from __future__ import annotations

import sys

from runtime.kernels.cases import (
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
from runtime.kernels.choice import NOTHING, Operation, Row, unless
from runtime.kernels.conditions import (
    A_FEW,
    ABSORBED,
    BF16,
    BY_ROLES,
    BY_WARPS,
    CODES_ONLY,
    CUBLAS,
    DECODED,
    EIGHTS,
    FEW,
    FEW_DECODES,
    FEW_STATES_OR_SEVERAL,
    FEW_TO_ROUTE,
    GATED_PROMPT,
    GPU,
    GROUPS,
    HEADS_BY_ROLES,
    IN_FLOAT,
    IN_FP8,
    IN_PIECES,
    IN_REGISTERS,
    JOINED,
    LEFT_UNSCALED,
    LINED,
    MANY,
    MANY_CODED,
    MANY_FLOAT,
    MORE,
    MULTIPLIED_BESIDE,
    NARROW,
    NO_GPU,
    ONE_ROW,
    PACKED,
    PROMPT,
    PROOF,
    QUANTISED,
    ROLES,
    ROWS,
    SEVERAL,
    STRIPS,
    TILES_OF_CODES,
    WHOLE_HEADS,
    WIDE,
)

LAYER = Operation("a decoder layer", Rows, (
    Row("runtime.model.layer_of_few_rows", (GPU, IN_REGISTERS),
        "norms and additions within the products: the number of kernels counts"),
    Row("runtime.model.layer_of_rows", (unless(GPU, IN_REGISTERS),),
        "norms apart: each is computed once, and not by every program of a product"),
))  # fmt: skip

CODES_WITH_ROWS = Row(
    "encode.rows.store_codes", (GPU, QUANTISED, GROUPS),
    "by the kernel that makes x, norm or gate: 87.2 ms for 89.1, 35B-A3B, a prompt of 8192",
)  # fmt: skip
CODES = Operation("FP8 codes of the rows x before a product", Inputs, (
    CODES_WITH_ROWS,
    Row(NOTHING, (unless(QUANTISED),), "few rows wait for the weights: nothing is gained"),
    Row("encode.rows.quantize_rows", (QUANTISED, unless(GPU, GROUPS)),
        "a kernel of its own: a whole row shares a scale, or the last group is short"),
))  # fmt: skip

PRODUCT = Operation("x W^T", Product, (
    Row("linear.product.linear_reference", (NO_GPU,), "plain torch, however W is stored"),
    Row("linear.row.row_linear", (GPU, IN_REGISTERS, unless(PACKED)),
        "in registers: 87 of FP8 34816 x 5120, in tiles 154 for 4 rows"),
    Row("linear.packed_stream.packed_row", (GPU, ONE_ROW, PACKED),
        "words stream through registers: H200, 15 of NVFP4 5120 x 17408, in parts 20"),
    Row("linear.packed_roles.nvfp4_rows", LINED,
        "warps load, decode, multiply in turns: H200, 64 rows, 27B 19.4 ms for 22.3"),
    Row("linear.packed_tiles.packed_linear", (GPU, ROWS, PACKED, unless(DECODED), unless(*LINED)),
        "decodes as it reads: H200, 58 for 8 rows of NVFP4 34816 x 5120"),
    Row("linear.packed_tiles.unpacked_linear", (GPU, ROWS, PACKED, DECODED),
        "W decoded once, then cuBLAS"),
    Row("linear.few.few_linear", (*SEVERAL, unless(IN_REGISTERS)),
        "x is the tensor cores' narrow side: H200, 8 rows, 9B gate and up 52 for 56 of cuBLAS"),
    Row("linear.rows.rows_linear", MANY_FLOAT,
        "more on its way at once: H200, 64 rows with the norm, 0.8B rule 8 for 12 of cuBLAS"),
    Row("linear.product.float_linear", (GPU, MORE, IN_FLOAT, unless(*MANY_FLOAT)), "cuBLAS"),
    Row("linear.product.tiled_linear", (GPU, MORE, IN_FP8, unless(QUANTISED), unless(DECODED)),
        "decodes as it reads: 106 for 16 rows of FP8 34816 x 5120"),
    Row("linear.product.decoded_linear", (GPU, IN_FP8, unless(QUANTISED), DECODED),
        "W decoded once, then cuBLAS: twice as fast as tiles that decode"),
    Row("linear.product.quantised_linear", (GPU, QUANTISED),
        "FP8 tensor cores: 95 for 117, 17 rows of 34816 x 5120; 2191 for 4283, 4096 rows"),
))  # fmt: skip

PRODUCTS = Operation("x times two W^T", Products, (
    Row("linear.few.few_products", SEVERAL, "one kernel: the second weight is small"),
    Row("linear.rows.rows_products", (MULTIPLIED_BESIDE,),
        "one kernel: the second weight is small"),
    Row("linear.product.joined_linear",
        (*JOINED, unless(*SEVERAL), unless(MULTIPLIED_BESIDE)),
        "one product: the second alone takes 3.9 of the 92 of a layer, 0.8B, 512 tokens, H200"),
    Row("linear.product.each_linear",
        (unless(*JOINED), unless(*SEVERAL), unless(MULTIPLIED_BESIDE)),
        "one after the other"),
))  # fmt: skip

UPDATE = Operation("x W^T that the next norm adds to the residual stream", Product, (
    Row("linear.few.few_parts", SEVERAL,
        "columns split among programs, the norm adds the parts: H200, 8 rows, 27B down 28 for 34"),
    Row("linear.rows.rows_parts", MANY_FLOAT,
        "split so too: H200, 64 rows with the norm, 0.8B down 5.4 for 8.5 of cuBLAS"),
    Row("linear.product.quantised_update", (GPU, QUANTISED), "quantised, then by CODES_UPDATE"),
    Row("linear.packed_roles.nvfp4_parts", LINED,
        "columns split among programs, the norm adds the parts"),
    Row("linear.product.linear",
        (unless(*SEVERAL), unless(*MANY_FLOAT), unless(GPU, QUANTISED), unless(*LINED)),
        "as any product"),
))  # fmt: skip

CODES_PRODUCT = Operation("codes of x times an FP8 W^T", CodesProduct, (
    Row("linear.rows.coded_rows", MANY_CODED,
        "H200, 64 rows, 27B gate and up 54 for 68 of cuBLAS, which fills them up to 128"),
    Row("linear.product.scaled_mm", (CUBLAS, unless(*MANY_CODED), unless(BY_ROLES)),
        "cuBLAS: 1300 TFLOP/s"),
    Row("linear.roles.roles_linear", (CUBLAS, unless(*MANY_CODED), BY_ROLES),
        "one wave of larger tiles: H200, 512 rows, 27B down 76 for 104 of cuBLAS, out 30 for 40"),
    Row("linear.product.tiled_codes", (unless(CUBLAS), unless(*MANY_CODED)),
        "what cuBLAS does not take"),
))  # fmt: skip

CODES_UPDATE = Operation("the same, added to the residual stream by the next norm", CodesProduct, (
    Row("linear.rows.coded_parts", MANY_CODED,
        "columns split among programs, the norm adds the parts: H200, 64 rows, 27B down 31 for 52"),
    Row("linear.product.codes_linear", (unless(*MANY_CODED),), "as any product of codes"),
))  # fmt: skip

ROW_PRODUCTS = Operation("a row, or a few, normed, times one or two W^T", NormedRow, (
    Row("linear.row.norm_row_linear_reference", (NO_GPU,), "plain torch"),
    Row("linear.packed_strips.packed_strips", (GPU, PACKED, NARROW),
        "norm and whole sums in one kernel: H200, 1 row of 35B-A3B 1.51 ms for 1.93, with experts"),
    Row("linear.packed_stream.packed_normed", (GPU, PACKED, unless(NARROW)),
        "normed before: a program would norm its columns for every block of rows"),
    Row("linear.row.normed_within", (GPU, unless(PACKED), unless(WIDE)),
        "every program norms the row again, which costs less than one more kernel"),
    Row("linear.row_strips.strips", (GPU, WIDE, STRIPS),
        "normed once for 16 rows of W: 764 for 785 (normed before), 12 layers of 35B-A3B"),
    Row("linear.row.normed_before", (GPU, unless(PACKED), WIDE, unless(STRIPS)),
        "norming in every program would take from the bandwidth"),
))  # fmt: skip

ROW_NORM = Operation("the norm of a row before a product that needs it whole", NormedRow, (
    Row("linear.row_parts.normed", (GPU, unless(PACKED), unless(WIDE)),
        "within the product, as above"),
    Row("norm.rms.rmsnorm", (unless(GPU, unless(PACKED), unless(WIDE)),),
        "a kernel of its own, as above"),
))  # fmt: skip

ROW_ADDED = Operation("a row, or a few, times W^T, added to the residual stream", Added, (
    Row("linear.row.row_linear", (unless(GPU, PACKED),), "added in registers"),
    Row("linear.packed_strips.packed_strip", (GPU, PACKED, NARROW), "added where whole sums are"),
    Row("linear.packed_stream.packed_row", (GPU, PACKED, unless(NARROW)),
        "added where whole sums are: H200, out of 27B 7.2, in parts 9.5"),
))  # fmt: skip

GATED = Operation("silu(gate) * up", Gated, (
    Row("linear.row_gated.row_gated", (GPU, IN_REGISTERS, unless(PACKED)),
        "product and gate in one: 93, 27B in FP8"),
    Row("linear.packed_stream.packed_gated", (GPU, ONE_ROW, PACKED),
        "product and gate in one: H200, 27B 28.6 for 33.9 of two kernels"),
    Row("linear.few_gated.few_gated", (*SEVERAL, unless(IN_REGISTERS)), "product and gate in one"),
    Row("linear.rows_gated.rows_gated", MANY_FLOAT,
        "product and gate in one: H200, 64 rows with the norm, 0.8B 7.1 for 8.9"),
    Row("linear.roles_gated.roles_gated", GATED_PROMPT,
        "product and gate in one: H200, 8192 rows, 0.8B 172 for 213"),
    Row("linear.packed_roles.nvfp4_gated", LINED, "product and gate in one"),
    Row("linear.mlp.silu_mul",
        (unless(GPU, ONE_ROW), unless(*SEVERAL), unless(*MANY_FLOAT), unless(*GATED_PROMPT),
         unless(*LINED)),
        "after the product; silu_mul_quantised where CODES of down names store_codes"),
))  # fmt: skip

ADDED_NORM = Operation("the norm of rows that are added to others", AddedRows, (
    Row("norm.pieces.add_pieces", (IN_PIECES,),
        "no thread has nothing: H200, 5120 numbers, 8192 rows 99 for 119, 512 rows 8.2 for 10.1"),
    Row("norm.rms.add_whole", (unless(IN_PIECES),), "a row, or a power of two, at once"),
))  # fmt: skip

ROUTER = Operation("logits of the experts", Router, (
    Row("moe.layer.padded_logits", (GPU, MANY, unless(EIGHTS)),
        "cuBLAS is slow for odd rows: 16 for 160, 8192 tokens and 257 rows"),
    Row("moe.router.few_logits", FEW_TO_ROUTE,
        "in registers, two experts a program: H200, four layers of 35B-A3B, 2 rows 195 for 214"),
    Row("linear.product.linear", (unless(GPU, MANY, unless(EIGHTS)), unless(*FEW_TO_ROUTE)),
        "as any product"),
))  # fmt: skip

EXPERTS = Operation("weighted experts of each token", ChosenExperts, (
    Row("moe.layer.moe_experts_reference", (NO_GPU,), "reads only experts that have tokens"),
    Row("moe.packed.packed_tokens", (GPU, PACKED, A_FEW), "each pair is a row"),
    Row("moe.packed.packed_tiles", (GPU, PACKED, unless(A_FEW), unless(PROMPT)),
        "pairs sorted by expert: H200, 8 tokens 71, 64 tokens 185, FP8 74 and 212"),
    Row("moe.packed.unpacked_pairs", (GPU, PACKED, PROMPT),
        "both stacks decoded once: tiles that decode take longer for a prompt"),
    Row("moe.rows.few_pairs", (GPU, FEW, unless(PACKED)), "each pair is a row: FP8, 4 tokens 62"),
    Row("moe.tiles.tiled_pairs", (GPU, MORE, unless(PACKED), unless(QUANTISED)),
        "pairs sorted by expert: FP8, 64 tokens 370, 2048 tokens 844"),
    Row("moe.tiles.tiled_codes", (GPU, MORE, QUANTISED, unless(TILES_OF_CODES)),
        "the same on codes, with any scales"),
    Row("moe.w8a8.w8a8_pairs", (GPU, MORE, QUANTISED, TILES_OF_CODES, unless(ROLES, MANY)),
        "codes all the way: 514 for 844, 2048 tokens"),
    Row("moe.roles.roles_pairs", (GPU, MORE, QUANTISED, TILES_OF_CODES, ROLES, MANY),
        "warps take turns: H200, 512 tokens 234 for 297, 8192 tokens 646 for 762"),
))  # fmt: skip

ONE_TOKEN = Operation("the sparse feed-forward of one token", OneToken, (
    Row("moe.row.routed_row", (GPU, ABSORBED, unless(PACKED)),
        "from the logits to the residual stream in two kernels: 1.77 ms a token, 35B-A3B"),
    Row("moe.packed_row.packed_routed_row", (GPU, ABSORBED, PACKED, BY_WARPS),
        "from the logits to the residual stream in two kernels: H200, NVFP4, see ROW_PRODUCTS"),
    Row("moe.packed.packed_tokens", (GPU, ABSORBED, PACKED, unless(BY_WARPS)),
        "the choice in a kernel of its own, the sum with the residual"),
    Row("moe.layer.moe_block", (unless(GPU, ABSORBED),), "by EXPERTS, the norm before it"),
))  # fmt: skip

RULE_STEP = Operation("the delta rule for the next tokens of each sequence", Step, (
    Row("delta_rule.mixed_step.mixed_step_reference", (NO_GPU,), "plain torch"),
    Row("delta_rule.whole.whole_heads", (GPU, WHOLE_HEADS),
        "one kernel, whose programs share no history: H200, 0.8B, 8 rows 0.884 ms for 0.968"),
    Row("delta_rule.several.several_unscaled", (GPU, LEFT_UNSCALED),
        "one kernel, the product after it scales: H200, 0.8B, one draft 695 us for 731"),
    Row("delta_rule.within.convolved_within",
        (GPU, FEW_STATES_OR_SEVERAL, unless(WHOLE_HEADS), unless(LEFT_UNSCALED)),
        "two kernels, where a third one costs more than its bytes"),
    Row("delta_rule.mixed_step.convolved_before",
        (GPU, unless(FEW_STATES_OR_SEVERAL), unless(WHOLE_HEADS)),
        "convolved once, normed by the rule: 148 for 150, 64 sequences of 27B"),
))  # fmt: skip

RULE_OUTPUT = Operation("the norm of the delta rule's output", RuleOutput, (
    Row("norm.gated.gated_rmsnorm_codes", (CODES_ONLY,), "nothing else reads the numbers"),
    Row("norm.gated.gated_rmsnorm", (unless(CODES_ONLY),), "numbers"),
))  # fmt: skip

ATTENTION = Operation("what attention does to its projections", Heads, (
    Row("attention.step.attention_step", (FEW_DECODES,),
        "norm, rotation and writing cost 0.2: 11.5 for 11.3, 0.8B, one sequence of 1000"),
    Row("attention.write.norm_rope_write", (unless(FEW_DECODES),),
        "once for each token; then attention_decode for decoding, PROMPTS for prompts"),
))  # fmt: skip

PROMPTS = Operation("attention of prompts", Prompt, (
    Row("attention.prefill.launch_prefill", (GPU, unless(PROOF), unless(HEADS_BY_ROLES)),
        "500 TFLOP/s"),
    Row("attention.roles.roles_prefill", (GPU, unless(PROOF), HEADS_BY_ROLES),
        "softmax beside sums: H200, a prompt of 8192, 0.8B 22.0 ms for 22.8"),
    Row("attention.reference.attention_prefill_reference", (unless(GPU, unless(PROOF)),),
        "float32 is for proof: its tiles take minutes to compile, then spill"),
))  # fmt: skip

DRAFT_INPUTS = Operation("[norm(embed[id]), norm(h)] W^T of the MTP head", Product, (
    Row("draft.inputs.normed_within", (GPU, A_FEW, IN_FLOAT, NARROW),
        "norms and product in one kernel: H200, 0.8B, two rows 3.7 for 10.2, one row 4.6 for 5.5"),
    Row("draft.inputs.normed_before", (unless(GPU, A_FEW, IN_FLOAT, NARROW),),
        "norms and product apart, as with other wide or many rows"),
))  # fmt: skip

DRAFT = Operation("the likeliest token after a row", NormedRow, (
    Row("draft.token.draft_token_reference", (NO_GPU,), "plain torch"),
    Row("draft.token.normed_within", (GPU, unless(PACKED), unless(WIDE)),
        "norm, product and choice in two kernels, no logits: 0.8B, H200, 20.9 for 26.8"),
    Row("draft.token.with_logits", (GPU, unless(unless(PACKED), unless(WIDE))),
        "as any norm and product: what it costs is the weight"),
))  # fmt: skip

DRAW = Operation("tokens drawn from logits", Draw, (
    Row("sample.draw.by_counts", (GPU, BF16),
        "65536 different logits at most: counted, where a sort of 248320 takes 440"),
    Row("sample.draw.by_sort", (unless(GPU, BF16),), "any float"),
))  # fmt: skip

OPERATIONS = (
    LAYER, CODES, PRODUCT, PRODUCTS, UPDATE, CODES_PRODUCT, CODES_UPDATE, ROW_PRODUCTS, ROW_NORM,
    ROW_ADDED, GATED, ADDED_NORM, ROUTER, EXPERTS, ONE_TOKEN, RULE_STEP, RULE_OUTPUT, ATTENTION,
    PROMPTS, DRAFT_INPUTS, DRAFT, DRAW,
)  # fmt: skip


def table() -> str:
    """Return all rows as text."""
    lines = []
    for operation in OPERATIONS:
        lines += [operation.name, ""]
        for row in operation.rows:
            when = "; ".join(condition.text for condition in row.when)
            lines += [f"    {row.kernel}", f"        when  {when}", f"        why   {row.why}"]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table())
