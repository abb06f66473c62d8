"""Print, as JSON, what each kernel that is launched early does before it waits.

Run as a program, without TRITON_INTERPRET: kernels are compiled for sm_90, which takes no GPU.
"""

from __future__ import annotations

import ast
import json
import sys
from importlib import import_module
from pathlib import Path

import torch

from runtime.kernels.attention.decode import attention_decode
from runtime.kernels.attention.prefill import launch_prefill
from runtime.kernels.attention.rope import rope_cos_sin
from runtime.kernels.attention.step import attention_step
from runtime.kernels.attention.write import norm_rope_write
from runtime.kernels.delta_rule import prefill, several, within
from runtime.kernels.delta_rule import whole as whole_rule
from runtime.kernels.delta_rule.conv1d import conv1d_prefill
from runtime.kernels.delta_rule.conv1d_step import conv1d_step
from runtime.kernels.delta_rule.rule import Rule
from runtime.kernels.delta_rule.step import launch_step
from runtime.kernels.draft.inputs import draft_linear
from runtime.kernels.draft.settle import Places, Turns, settle
from runtime.kernels.draft.token import draft_token
from runtime.kernels.encode.lined import Lined
from runtime.kernels.encode.rows import Codes, quantize_rows
from runtime.kernels.launch import HAS_GLUON
from runtime.kernels.linear import (
    few,
    few_gated,
    mlp,
    packed_roles,
    packed_stream,
    packed_strips,
    packed_tiles,
    roles,
    roles_gated,
    row,
    row_gated,
    row_heads,
    rows,
    rows_gated,
)
from runtime.kernels.linear.packed import PackedWeight
from runtime.kernels.linear.row_strips import strips
from runtime.kernels.linear.weight import Fp8Weight, Stored
from runtime.kernels.moe import rows as moe_rows
from runtime.kernels.moe.packed import packed_tokens
from runtime.kernels.moe.packed_row import packed_routed_row
from runtime.kernels.moe.router import few_logits
from runtime.kernels.moe.routing import route, route_absorbed
from runtime.kernels.moe.row import routed_row
from runtime.kernels.moe.sort import expert_blocks
from runtime.kernels.moe.sum import Pairs, add_pairs_rmsnorm
from runtime.kernels.norm import gated, rms
from runtime.kernels.sample.likeliest import likeliest
from runtime.kernels.waves import MULTIPROCESSORS
from tests.runtime.kernels import planted
from tests.runtime.kernels.launches import caught, dialect, source
from tests.runtime.kernels.order import Order

KERNELS = Path("runtime/kernels")


def some(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def whole(*shape):
    return some(*shape, dtype=torch.int64)


def fp8(*shape, edge=128):
    *stack, n, k = shape
    grid = (-(-n // 128), -(-k // 128)) if edge > 1 else (n, 1)
    codes = some(*shape, dtype=torch.float8_e4m3fn)
    return Fp8Weight(codes, some(*stack, *grid, dtype=torch.float32))


def packed(*shape, group):
    """Return NVFP4 where a group is 16, else INT4."""
    *stack, n, k = shape
    chunks, form = -(-k // 256), torch.uint8 if group == 16 else torch.bfloat16
    words = some(*stack, chunks, n, 32, dtype=torch.int32)
    scale = some(*stack, chunks, n, 256 // group, dtype=form)
    return PackedWeight(words, scale, some(*stack, n, dtype=torch.float32), k)


def attention(length, rows=4):
    q, k, norm, angle = some(rows, 16, 256), some(rows, 2, 256), some(256), some(rows, 32)
    pool, at = some(8, length, 2, 256), (whole(rows), whole(rows))
    inputs = q, q, k, k, norm, norm, angle, angle, 1e-6, pool, pool, *at
    for each in (1, 2, 4) if rows == 4 else (1,):
        attention_step(*inputs, each)
    attention_step(*inputs, rows, whole(1))
    norm_rope_write(q, k, k, norm, norm, angle, angle, 1e-6, pool, pool, *at)
    attention_decode(q, q, pool, pool, *at, late=rows)


def delta_rule(rows, sequences):
    heads, key_heads = 32, 16
    channels = (2 * key_heads + heads) * 128
    qkv, z, head = some(rows, channels), some(rows, heads, 128), some(heads)
    rule = Rule(some(channels, 1, 4), head, head, some(128), (key_heads, 128), (heads, 128), 1e-6)
    pools = some(16, channels, 3), some(16, heads, 128, 128, dtype=torch.float32)
    a, at = some(rows, heads), (whole(sequences), whole(rows))
    within.convolved_within(qkv, z, a, a, rule, *pools, *at)
    conv1d_step(qkv, rule.conv_C1K, pools[0], at[1])
    gate = gated.Gate(z, rule.norm_v, 1e-6)
    for each in (None, gate):
        launch_step(*rule.split(qkv), a, a, head, head, pools[1], at[1], each)


def several_tokens(rows, heads):
    channels, head = (32 + heads) * 128, some(heads)
    qkv, z, a = some(rows, channels), some(rows, heads, 128), some(rows, heads)
    rule = Rule(some(channels, 1, 4), head, head, some(128), (16, 128), (heads, 128), 1e-6)
    pools = some(16, channels, 3), some(16, heads, 128, 128, dtype=torch.float32)
    several.several_unscaled(qkv, z, a, a, rule, *pools, whole(1), whole(rows))


def unscaled(rows, hidden=1024):
    squares = some(rows, 16, 8, dtype=torch.float32)
    x = gated.Unscaled(some(rows, 2048), squares, 128, 1e-6)
    if rows <= 2:
        row_heads.row_heads(x, some(hidden, 2048), some(rows, hidden))
    few.few_heads(x, some(hidden, 2048))


def whole_heads(rows, sequences):
    channels, head = 3 * 16 * 128, some(16)
    qkv, z, a = some(rows, channels), some(rows, 16, 128), some(rows, 16)
    rule = Rule(some(channels, 1, 4), head, head, some(128), (16, 128), (16, 128), 1e-6)
    pools = some(16, channels, 3), some(16, 16, 128, 128, dtype=torch.float32)
    whole_rule.whole_heads(qkv, z, a, a, rule, *pools, whole(sequences), whole(rows))


def prompt(tokens=512):
    q, pool = some(tokens, 16, 256), some(8, 2 * tokens, 2, 256)
    launch_prefill(q, q, pool, pool, whole(2), whole(3), whole(2))
    heads, key_heads = 32, 16
    channels, a, head = (2 * key_heads + heads) * 128, some(tokens, heads), some(heads)
    slots, at = whole(2), whole(3)
    conv1d_prefill(some(tokens, channels), some(channels, 1, 4), some(16, channels, 3), slots, at)
    q, v = some(tokens, key_heads, 128), some(tokens, heads, 128)
    states = some(16, heads, 128, 128, dtype=torch.float32)
    prefill.launch_prefill(q, q, v, a, a, head, head, states, slots, at)
    quantize_rows(some(tokens, 2048), 128)
    mlp.silu_mul_quantised(some(tokens, 2048))


def long_prompt(tokens=8192, heads=16):
    q, a, head = some(tokens, heads, 128), some(tokens, heads), some(heads)
    states = some(16, heads, 128, 128, dtype=torch.float32)
    prefill.launch_prefill(q, q, q, a, a, head, head, states, whole(1), whole(2))


def by_roles(tokens=512):
    if HAS_GLUON:
        roles_gated.roles_gated(some(tokens, 1024), some(7168, 1024))
        codes = Codes.room(tokens, 6144, torch.device("meta"))
        roles.roles_linear(codes, fp8(5120, 6144), torch.bfloat16)


def norms(hidden, rows=4):
    x, norm, codes = (
        some(rows, hidden),
        some(hidden),
        Codes.room(rows, hidden, torch.device("meta")),
    )
    z = some(rows, 32, 128)
    rms.rmsnorm(x, norm, 1e-6)
    rms.rmsnorm(x, norm, 1e-6, codes)
    rms.add_rmsnorm(x, x, norm, 1e-6)
    rms.add_rmsnorm(x, x, norm, 1e-6, codes)
    rms.add_rmsnorm(rms.Parts(some(4, rows, hidden, dtype=torch.float32)), x, norm, 1e-6)
    gated.gated_rmsnorm(z, z, some(128), 1e-6)
    gated.gated_rmsnorm_codes(z, z, some(128), 1e-6)
    add_pairs_rmsnorm(Pairs(some(rows * 9, hidden), 9), x, norm, 1e-6)


def in_registers(hidden, weight, rows=1):
    x, norm = some(rows, hidden), some(hidden)
    row.row_linear(x, weight(2 * hidden, hidden), some(rows, 2 * hidden))
    row.row_linear(x, weight(512, hidden))
    row.normed_within(x, norm, 1e-6, weight(4 * hidden, hidden), some(64, hidden))
    if rows == 1:
        row._launch(x, norm, 1e-6, None, weight(257, hidden), kept=some(1, hidden))
    row_gated.row_gated(x, weight(8 * hidden, hidden), norm)
    row_gated.row_gated(x, weight(8 * hidden, hidden))


def drafts(head):
    x, norm, fc = some(2, 1024), some(1024), some(1024, 2048)
    draft_linear(whole(2), some(512, 1024), norm, x, norm, 1e-6, fc, whole(1))
    draft_linear(whole(1), some(512, 1024), norm, x[:1], norm, 1e-6, fc)
    draft_token(x[:1], norm, 1e-6, head(4096, 1024), whole(1))


def few_rows(weight, hidden=2048):
    x = some(4, hidden)
    few.few_products(x, weight(12288, hidden), some(64, hidden))
    few.few_linear(x, weight(1024, hidden))
    few.few_parts(some(4, 2 * hidden), weight(hidden, 2 * hidden))
    few_gated.few_gated(x, weight(8 * hidden, hidden))


def many_rows(hidden=2048):
    x = some(64, hidden)
    rows.rows_products(x, some(12288, hidden), some(64, hidden))
    rows.rows_linear(x, some(257, hidden))
    rows.rows_parts(some(64, 2 * hidden), some(hidden, 2 * hidden))
    rows_gated.rows_gated(x, some(8 * hidden, hidden))
    mlp.silu_mul(some(64, 8 * hidden))


def many_codes(edge, hidden=2048):
    x = some(64, hidden)
    codes = quantize_rows(x, hidden if edge == 1 else 128, 16)
    weights = fp8(12288, hidden, edge=edge), fp8(hidden, hidden, edge=edge)
    rows.rows_products(x, weights[0], some(64, hidden), codes=codes)
    rows.coded_rows(codes, weights[0], x.dtype)
    rows.coded_parts(codes, weights[1], x)
    mlp.silu_mul_quantised(some(64, 8 * hidden))


def experts(weight, tokens=4):
    gate_up, down = Stored.of(weight(257, 1024, 2048)), Stored.of(weight(257, 2048, 512))
    routed_row(some(1, 2048), gate_up, down, some(1, 257), 8, some(1, 2048))
    moe_rows.few_pairs(some(tokens, 2048), gate_up, down, some(tokens, 9), whole(tokens, 9))


def between_steps():
    places = Places(whole(4), whole(4), whole(4))
    turns = Turns(some(4, 32), some(4, 32), some(32, dtype=torch.float32), 1.0)
    settle(whole(4), places, whole(4), whole(1), places, turns)
    rope_cos_sin(whole(4), 64, 1e7, None, torch.bfloat16)


def choices():
    few_logits(some(4, 2048), some(257, 2048))
    route(some(4, 256), 8)
    route_absorbed(some(4, 257), 8)
    expert_blocks(whole(64, 9), 257, 16)
    expert_blocks(whole(128, 9), 257, 16)
    likeliest(some(4, 248320), 0)


def four_bits(group):
    def weight(*shape):
        return packed(*shape, group=group)

    packed_stream.packed_row(some(1, 2048), weight(2048, 2048), some(1, 2048))
    packed_stream.packed_gated(some(1, 2048), weight(8192, 2048))
    wide = some(1, 5120), some(5120), 1e-6
    packed_stream.packed_normed(*wide, weight(16384, 5120), some(96, 5120))
    normed = some(1, 2048), some(2048), 1e-6
    packed_strips.packed_strips(*normed, weight(12288, 2048), some(64, 2048))
    packed_strips.packed_strip(some(1, 4096), weight(2048, 4096), some(1, 2048))
    stacks = weight(257, 1024, 2048), weight(257, 2048, 512)
    packed_routed_row(some(1, 2048), *stacks, some(1, 257), 8, some(1, 2048))
    packed_tokens(some(4, 2048), *stacks, some(4, 9), whole(4, 9), some(4, 2048))
    packed_tiles.packed_linear(some(64, 2048), weight(1024, 2048))
    if HAS_GLUON and group == 16:
        x, room = some(64, 2048), Lined.room(64, 2048, some(1))
        packed_roles.nvfp4_rows(x, weight(12288, 2048))
        packed_roles.nvfp4_gated(x, weight(16384, 2048))
        rms.rmsnorm(x, some(2048), 1e-6, room)
        inner = packed_roles.lined_gated(x, weight(16384, 2048), room)
        packed_roles.lined_parts(inner, weight(2048, 8192))


def cases():
    attention(8192)
    attention(512)
    attention(1 << 17, rows=1)
    delta_rule(1, 1)
    delta_rule(4, 1)
    delta_rule(16, 16)
    whole_heads(2, 2)
    whole_heads(8, 8)
    for tokens in (2, 4):
        several_tokens(tokens, 16)
        several_tokens(tokens, 32)
        unscaled(tokens)
    prompt()
    prompt(8192)
    long_prompt()
    by_roles()
    norms(2048)
    norms(5120)
    for hidden in (1024, 2048, 5120):
        in_registers(hidden, some)
        in_registers(hidden, fp8)
    in_registers(2048, lambda *shape: fp8(*shape, edge=1))
    in_registers(1024, some, 2)
    drafts(some)
    drafts(lambda *shape: fp8(*shape, edge=1))
    for edge in (1, 128):
        few_rows(lambda *shape, edge=edge: fp8(*shape, edge=edge))
        experts(lambda *shape, edge=edge: fp8(*shape, edge=edge))
        second = some(64, 2048), fp8(64, 2048, edge=edge)
        strips(some(1, 2048), some(2048), 1e-6, fp8(12288, 2048, edge=edge), second[0])
        strips(some(1, 2048), some(2048), 1e-6, fp8(12288, 2048, edge=edge), second[1])
        many_codes(edge)
    few_rows(some)
    many_rows()
    many_rows(hidden=1000)
    for hidden in (1000, 4096, 4104):
        few_rows(some, hidden)
    few_rows(fp8, hidden=1152)
    experts(some)
    choices()
    between_steps()
    for group in (16, 32, 128):
        four_bits(group)


def name_of(kernel):
    return f"{kernel.fn.__module__.removeprefix('runtime.kernels.')}.{kernel.fn.__name__}"


def launched_early():
    """Return the kernels that the sources launch early."""
    names = set()
    for path in KERNELS.rglob("*.py"):
        module = ".".join(path.with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and any(_is_early(word) for word in node.keywords):
                names.add(name_of(getattr(import_module(module), node.func.value.id)))
    return sorted(names)


def _is_early(word):
    return word.arg is None and ast.unparse(word.value) == "early()"


def orders():
    """Return of each kernel what it does before it waits in any case, and if it waits in all."""
    with caught() as launches:
        cases()
        planted.cases(some(64, 64))
    found, seen = {}, set()
    for kernel, arguments, options in launches:
        if not options.pop("launch_pdl", False):
            continue
        given = source(kernel, arguments)
        key = given.hash(), str(options)
        if key not in seen:
            order = Order(dialect(given, options))
            early, waits = found.get(name_of(kernel), (set(), True))
            found[name_of(kernel)] = early | order.early, waits and order.waits
        seen.add(key)
    return {name: (sorted(early), waits) for name, (early, waits) in found.items()}


if __name__ == "__main__":
    roles.multiprocessors = roles_gated.multiprocessors = lambda gpu: MULTIPROCESSORS
    sys.stdout.write(json.dumps({"launched": launched_early(), "orders": orders()}))
