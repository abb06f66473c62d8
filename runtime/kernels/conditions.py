"""The conditions of the table in dispatch, and the thresholds in them.

A condition is a sentence and a function of a case (`cases`). A tuple of conditions is what several
rows have in common.
"""

from __future__ import annotations

import torch

from runtime.kernels.cases import FLOAT, FP8_BLOCK, FP8_CHANNEL, GROUP, INT4, NVFP4, PIECE
from runtime.kernels.choice import When, unless
from runtime.kernels.waves import fills, fits

FEW_ROWS = 16
DECODED_ROWS = 512
WIDE_ROW = 2048
LARGE_WEIGHT = 12 << 20
WIDEST_STRIP = 2048  # a thread has 32 numbers of x
A_FEW_ROWS = 2  # of three a thread cannot hold the sums: 0.8B 0.889 ms, four by tiles 0.840
SHORT_ROW = 1024
NARROW_ROW = 2048
WIDEST_WHOLE = 4096  # 16 chunks of a four-bit weight, two for each warp
SMALL_WEIGHT = 6 << 20
FEW_TOKENS = 8
DECODED_TOKENS = 64
FEWEST_LINED = 33  # of 8 the tiles take as long: H200, four layers of 27B, 538 us for 542
A_FEW_TOKENS = 4
PROMPT_TOKENS = 4096
MANY_TOKENS = 256
WIDEST_KEPT = 1024  # a block's inner activations take half of a multiprocessor's memory
FEW_STATES = 256
FEW_HEADS = 128  # a multiprocessor for each
FEW_KEY_HEADS = 64
FEW_EACH = 4
HEAD, QUERIES = 256, 64  # of a task of attention.roles
HOPPER = (9, 0)

GPU = When("GPU", lambda case: case.gpu)
NO_GPU = When("no GPU", lambda case: not case.gpu)
ONE_ROW = When("1 row", lambda case: case.rows == 1)
IN_REGISTERS = When(
    f"1 row, or {A_FEW_ROWS} or fewer of {SHORT_ROW} columns or fewer and float weights",
    lambda case: (
        case.rows == 1 or (case.rows <= A_FEW_ROWS and case.k <= SHORT_ROW and case.form == FLOAT)
    ),
)
ROWS = When("2 rows or more", lambda case: case.rows != 1)
FEW = When(f"{FEW_TOKENS} rows or fewer", lambda case: case.rows <= FEW_TOKENS)
MORE = When(f"{FEW_TOKENS + 1} rows or more", lambda case: case.rows > FEW_TOKENS)
A_FEW = When(f"{A_FEW_TOKENS} rows or fewer", lambda case: case.rows <= A_FEW_TOKENS)
PROMPT = When(f"{PROMPT_TOKENS} rows or more", lambda case: case.rows >= PROMPT_TOKENS)
MANY = When(f"{MANY_TOKENS} rows or more", lambda case: case.rows >= MANY_TOKENS)
IN_FLOAT = When("float weight", lambda case: case.form == FLOAT)
PACKED = When("four-bit weight", lambda case: case.form in (NVFP4, INT4))
IN_FP8 = When("FP8 weight", lambda case: case.form in (FP8_BLOCK, FP8_CHANNEL))
QUANTISED = When(
    f"x quantised: dynamic FP8, over {FEW_ROWS} rows",
    lambda case: case.dynamic and case.rows > FEW_ROWS,
)
NARROW = When(f"{2 * SHORT_ROW} columns or fewer", lambda case: case.k <= 2 * SHORT_ROW)
GROUPS = When(
    "scales of whole groups of 128 columns",
    lambda case: (case.form == FP8_BLOCK or case.k <= GROUP) and case.k % GROUP == 0,
)
DECODED = When(
    f"{DECODED_ROWS} rows or more of 16 bits",
    lambda case: case.rows >= DECODED_ROWS and case.dtype.itemsize == 2,
)
CUBLAS = When(
    "Hopper, BF16, float32 scales, n % 16 == 0, k % 16 == 0 (block: % 512)",
    lambda case: (
        case.card == HOPPER
        and case.dtype == torch.bfloat16
        and case.scale == torch.float32
        and case.n % 16 == 0
        and case.k % (16 if case.form == FP8_CHANNEL else 4 * GROUP) == 0
    ),
)
BY_ROLES = When(
    f"Triton 3.6 or later, {MANY_TOKENS} rows or more, block scales, n in whole blocks, "
    "0.7 of the steps of cuBLAS's tiles, or less (waves)",
    lambda case: (
        case.gluon
        and case.rows >= MANY_TOKENS
        and case.form == FP8_BLOCK
        and case.n % GROUP == 0
        and fits(case.rows, case.n)
    ),
)
GATED_BY_ROLES = When(
    f"Hopper, Triton 3.6 or later, {DECODED_ROWS} rows or more, gate and up in whole tiles, "
    "0.8 of the multiprocessors' time used (waves)",
    lambda case: (
        case.gluon
        and case.rows >= DECODED_ROWS
        and fills(case.rows, case.n)
        and case.n % (2 * GROUP) == 0
        and case.k % 64 == 0
    ),
)
IN_PIECES = When(
    f"no parts, whole pieces of {PIECE} numbers, but no power of two",
    lambda case: (
        not case.parts and not case.lined and case.k % PIECE == 0 and case.k & (case.k - 1) != 0
    ),
)
WIDE = When(
    f"{WIDE_ROW} columns or more, {LARGE_WEIGHT >> 20} MiB or more",
    lambda case: case.k >= WIDE_ROW and case.nbytes >= LARGE_WEIGHT,
)
STRIPS = When(
    f"FP8 weight, {WIDEST_STRIP} columns or fewer",
    lambda case: case.form in (FP8_BLOCK, FP8_CHANNEL) and case.k <= WIDEST_STRIP,
)
NARROW = When(
    f"{NARROW_ROW} columns or fewer, or {WIDEST_WHOLE} and less than {SMALL_WEIGHT >> 20} MiB",
    lambda case: case.k <= NARROW_ROW or (case.k <= WIDEST_WHOLE and case.nbytes < SMALL_WEIGHT),
)
FEW_TO_ROUTE = (
    GPU,
    ROWS,
    FEW,
    When(f"hidden {WIDEST_WHOLE} or less", lambda case: case.hidden <= WIDEST_WHOLE),
)
EIGHTS = When("experts in eights", lambda case: case.experts % 8 == 0)
TILES_OF_CODES = When(
    "block scales, hidden and inner in whole groups of 128",
    lambda case: case.form == FP8_BLOCK and case.hidden % GROUP == case.inner % GROUP == 0,
)
ROLES = When(
    f"Hopper, Triton 3.6 or later, inner size {WIDEST_KEPT} or less",
    lambda case: case.gluon and case.inner <= WIDEST_KEPT,
)
BY_WARPS = When(
    f"{FEW_TOKENS} experts or fewer, hidden {WIDEST_WHOLE} or less, inner {WIDEST_KEPT} or less",
    lambda case: (
        case.top <= FEW_TOKENS and case.hidden <= WIDEST_WHOLE and case.inner <= WIDEST_KEPT
    ),
)
ABSORBED = When("shared expert in the stack", lambda case: case.absorbed)
FEW_STATES_OR_SEVERAL = When(
    f"fewer than {FEW_STATES} states, or several tokens of a sequence",
    lambda case: case.each > 1 or case.states < FEW_STATES,
)
WHOLE_HEADS = When(
    f"{FEW_HEADS} states or fewer, a key head for each, one token of a sequence",
    lambda case: case.group == case.each == 1 and case.states <= FEW_HEADS,
)
LEFT_UNSCALED = When(
    f"several tokens of a sequence, {FEW_TOKENS} rows or fewer, heads of {GROUP}, then a float "
    f"weight of {NARROW_ROW} columns or fewer",
    lambda case: (
        case.each > 1
        and case.rows <= FEW_TOKENS
        and case.head == GROUP
        and case.k <= NARROW_ROW
        and case.form == FLOAT
    ),
)
CODES_ONLY = When(
    "prompts only, heads of 128, codes taken",
    lambda case: not case.decodes and case.head == GROUP and case.takes_codes,
)
FEW_DECODES = When(
    f"decoding only, {FEW_EACH} rows of a slot or fewer, {FEW_KEY_HEADS} key heads or fewer",
    lambda case: (
        not case.prompts
        and case.each <= FEW_EACH
        and 0 < case.rows * case.kv_heads <= FEW_KEY_HEADS
    ),
)
BF16 = When("BF16", lambda case: case.dtype == torch.bfloat16)
SEVERAL = (GPU, ROWS, FEW, unless(PACKED))
TO_64 = When(
    f"{FEW_TOKENS + 1} to {DECODED_TOKENS} rows",
    lambda case: FEW_TOKENS < case.rows <= DECODED_TOKENS,
)
LINED = (
    When(
        f"{FEWEST_LINED} to {DECODED_TOKENS} rows",
        lambda case: FEWEST_LINED <= case.rows <= DECODED_TOKENS,
    ),
    When("NVFP4, Hopper, Triton 3.6 or later", lambda case: case.gpu and case.lined),
)
MANY_FLOAT = (GPU, TO_64, IN_FLOAT, BF16)
ON_HOPPER = When("Hopper", lambda case: case.card == HOPPER)
MANY_CODED = (ON_HOPPER, TO_64)
GATED_PROMPT = (IN_FLOAT, BF16, GATED_BY_ROLES)
MULTIPLIED_BESIDE = When(
    f"{TO_64.text}, BF16, float weight, or FP8 weight and codes of x on Hopper",
    lambda case: (
        all(when.holds(case) for when in (GPU, TO_64, BF16))
        and (case.form == FLOAT or (case.coded and case.card == HOPPER))
    ),
)
JOINED = (GPU, When("the weights are one in memory", lambda case: case.joined))
HEADS_BY_ROLES = When(
    f"Hopper, Triton 3.6 or later, 16 bits, heads of {HEAD} in pairs of one key head, {QUERIES} "
    "tokens or more a sequence",
    lambda case: (
        case.gluon
        and case.dtype.itemsize == 2
        and case.head == HEAD
        and case.group % 2 == 0
        and case.each >= QUERIES
    ),
)
PROOF = When("compiled in float32", lambda case: case.compiled and case.dtype == torch.float32)
