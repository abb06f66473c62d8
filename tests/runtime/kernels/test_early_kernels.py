"""What kernels that are launched early do before they wait: in compiled code, not in the source."""

from __future__ import annotations

import pytest

from runtime.kernels.launch import HAS_TRITON
from tests.runtime.kernels.compiled import compiled_by

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed"),
    pytest.mark.all,  # twenty seconds of compiling
]

# Before it waits a kernel may read what no kernel of a step writes, and let the next one start
# ("start_next"). All of these are weights, their scales and norms, except:
#   slots, sources, lengths   written before a kernel that is not launched early: an embedding, or
#                             the inputs of the draft head, or its first product, which has no
#                             "start_next"
#   rows                      so are those of combine, which drafts alone choose
#   pool, conv_pool           states and histories that an earlier step wrote
#   pool_k, pool_v            keys and values of earlier steps; decode leaves the newest ones out
#   logits, residual          row_down and packed_row: the kernel before it starts it only after its
#                             own wait
#   experts, weights          moe.rows: so it does there
# The kernels before these must not have "start_next".
BEFORE = {
    "attention.decode._decode_kernel": "lengths pool_k pool_v slots start_next",
    "attention.parts._combine_kernel": "rows start_next",
    "attention.prefill._kernel": "start_next",
    "attention.rope._cos_sin_kernel": "axis frequency start_next",
    "attention.step._step_kernel": "lengths pool_k pool_v slots start_next wk wq",
    "attention.write._kernel": "start_next wk wq",
    "delta_rule.chunk_gates._gates_kernel": "start_next",
    "delta_rule.conv1d._history_kernel": "start_next",
    "delta_rule.conv1d._prefill_kernel": "start_next",
    "delta_rule.conv1d_step._step_kernel": "pool slots start_next weight",
    "delta_rule.halves._halves_kernel": "start_next",
    "delta_rule.halves._join_kernel": "start_next",
    "delta_rule.prefill._scan_kernel": "start_next",
    "delta_rule.several._several_kernel": (
        "A_log conv_pool dt_bias filters norm pool slots sources start_next"
    ),
    "delta_rule.solve._solve_kernel": "start_next",
    "delta_rule.step._step_kernel": "A_log dt_bias pool slots start_next",
    "delta_rule.whole._heads_kernel": (
        "A_log conv_pool dt_bias filters norm pool slots start_next"
    ),
    "delta_rule.within._norm_kernel": "slots sources start_next weight",
    "delta_rule.within._rule_kernel": (
        "A_log conv_pool dt_bias filters pool slots sources start_next"
    ),
    "draft.inputs._linear_kernel": "fc w_embed w_hidden",
    "draft.settle._settle_kernel": "frequency start_next",
    "draft.token._token_kernel": "head norm scale start_next",
    "encode.lined._lined_kernel": "start_next",
    "encode.rows._quantize_rows_kernel": "start_next",
    "linear.few._few_kernel": "scale start_next weight weight2",
    "linear.few_gated._gated_kernel": "gate_up scale start_next",
    "linear.mlp._silu_mul_kernel": "start_next",
    "linear.mlp._silu_mul_quantised_kernel": "start_next",
    "linear.packed_roles_tile.kernel": "row_factor scales start_next words",
    "linear.packed_rows._finish_kernel": "start_next",
    "linear.packed_rows._parts_kernel": "start_next",
    "linear.packed_stream._stream_kernel": "row scale start_next weight2 words",
    "linear.packed_strips._strips_kernel": "norm row scale start_next weight2 words",
    "linear.packed_tiles._spread_kernel": "start_next",
    "linear.packed_tiles._sum_parts_kernel": "start_next",
    "linear.roles_gated.kernel": "start_next",
    "linear.roles_tile.kernel": "further_w w",
    "linear.row._rows_kernel": "norm scale start_next weight weight2",
    "linear.row_gated._gated_kernel": "gate_up norm scale start_next",
    "linear.row_heads._heads_kernel": "start_next weight",
    "linear.row_strips._strips_kernel": "norm scale scale2 start_next weight weight2",
    "linear.rows._rows_kernel": "start_next",
    "linear.rows_gated._gated_kernel": "start_next",
    "moe.packed_row._down_kernel": "logits residual row scale start_next words",
    "moe.packed_row._gated_kernel": "words",
    "moe.router._logits_kernel": "router start_next",
    "moe.routing._route_kernel": "start_next",
    "moe.row._gated_kernel": "gate_up",
    "moe.row_down.down_kernel": "down logits residual scale start_next",
    "moe.rows._down_kernel": "down experts scale start_next weights",
    "moe.rows._gated_kernel": "",
    "moe.sort._before_kernel": "start_next",
    "moe.sort._few_kernel": "start_next",
    "moe.sort._place_kernel": "start_next",
    "moe.sort._rank_kernel": "start_next",
    "moe.sum._sum_norm_kernel": "start_next weight",
    "norm.gated._gated_codes_kernel": "start_next",
    "norm.gated._gated_rmsnorm_kernel": "start_next",
    "norm.pieces._pieces_kernel": "start_next",
    "norm.rms._add_rmsnorm_kernel": "start_next weight",
    "norm.rms._rmsnorm_kernel": "start_next weight",
    "sample.likeliest._chunk_kernel": "start_next",
    "sample.likeliest._row_kernel": "start_next",
}
PLANTED = {
    "right": ("", True),
    "reads_before": ("start_next x", True),
    "stores_before": ("store y", True),
    "copies_before": ("store y tiles", True),
    "waits_in_one_branch": ("store y x", False),
    "waits_after_return": ("store y x", False),
    "reads_ahead": ("x", True),
    "waits_in_a_later_turn": ("store y", False),
    "waits_in_the_first_turn": ("", True),
}


@pytest.fixture(scope="module")
def found():
    return compiled_by("early_kernels")


def test_all_that_are_launched_early_are_looked_at(found):
    assert found["launched"] == sorted(BEFORE)
    assert set(BEFORE) < set(found["orders"])


@pytest.mark.parametrize("name", BEFORE)
def test_before_it_waits_a_kernel_reads_what_none_writes(found, name):
    """The compiler may move a wait behind reads that the source has after it."""
    early, waits = found["orders"][name]
    assert early == BEFORE[name].split()
    assert waits, "it does not wait on every path"


@pytest.mark.parametrize("name", PLANTED)
def test_a_kernel_that_waits_too_late_is_found_out(found, name):
    early, waits = found["orders"][f"tests.runtime.kernels.planted.{name}"]
    assert (" ".join(early), waits) == PLANTED[name]
