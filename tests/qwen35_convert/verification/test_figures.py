"""How large an artifact is, and its error by layer and role."""

from __future__ import annotations

import math

import pytest

from quant.measure import Error
from qwen35_convert import api
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.verification.compare import Compared
from qwen35_convert.verification.figures import RoleError, Size, by_role
from tests.checkpoints import dense, moe

NO_PROOF = api.RunOptions(verify=False)


def compared(name, role, error=None):
    lost = Error() if error is None else Error(sum_sq_error=error, sum_sq=100.0, count=10)
    return Compared(name, name, role, "keep" if error is None else "int4", lost)


def test_errors_of_one_role_in_one_layer_are_joined_by_their_energy():
    found = by_role([
        compared("embed_tokens", "embed"),
        compared("layers.3.mlp.experts.0.up_proj", "expert", 1.0),
        compared("layers.3.mlp.experts.1.up_proj", "expert", 3.0),
        compared("layers.3.mlp.experts.2.up_proj", "expert"),
        compared("layers.10.mlp.down_proj", "down_proj", 4.0),
        compared("mtp.layers.0.mlp.down_proj", "down_proj", 1.0),
    ])  # fmt: skip
    assert found == [
        RoleError("embed_tokens", None, "embed", 1, None),
        RoleError("layers.3", 3, "expert", 3, float(f"{math.sqrt(4 / 200):.6g}")),
        RoleError("layers.10", 10, "down_proj", 1, 0.2),
        RoleError("mtp", None, "down_proj", 1, 0.1),
    ]


@pytest.mark.parametrize("make", [dense, moe])
def test_bits_count_scales_and_what_is_kept_but_neither_vision_nor_mtp(tmp_path, make):
    source = make(tmp_path / "in")
    api.convert(source, tmp_path / "fp8", "fp8-block", NO_PROOF)
    plain, fp8 = (Size.of(open_checkpoint(path)) for path in (source, tmp_path / "fp8"))
    assert plain.weights == fp8.weights
    assert plain.model < plain.nbytes, "vision and MTP are there"
    assert fp8.model < fp8.nbytes, "MTP is there"
    assert plain.bits == pytest.approx(16, rel=0.05)
    assert 8 < fp8.bits < 16


def test_a_gguf_has_as_many_weights_as_its_source(tmp_path, nano):
    api.convert(nano, tmp_path / "q8.gguf", "gguf-q8_0", NO_PROOF)
    source, q8 = (Size.of(open_checkpoint(path)) for path in (nano, tmp_path / "q8.gguf"))
    assert q8.weights == source.weights
    assert 8.5 < q8.bits < 9


def test_a_report_holds_both_sizes_and_the_errors(tmp_path):
    source = dense(tmp_path / "in")
    api.convert(source, tmp_path / "out", "fp8-block", NO_PROOF)
    report = api.verify(tmp_path / "out", source)
    told = report.as_dict()
    assert told["source_size"]["bits_per_weight"] > told["size"]["bits_per_weight"] > 8
    errors = {(one["layer"], one["role"]): one["relative_rms"] for one in told["by_role"]}
    assert 0.01 < errors[0, "down_proj"] < 0.05
    assert errors[0, "norm"] is None
