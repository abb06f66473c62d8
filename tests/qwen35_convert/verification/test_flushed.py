"""Scales that Marlin takes for zero: a note where nothing is lost with them, else a failure."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import qwen35_convert as q
from quant.fourbit.cpu import encode_e2m1

WEIGHTS, RECEIPT = "model.safetensors", "qwen35-receipt.json"
LAYER = "model.language_model.layers.1.mlp."
TINY = 2.0**-17


@pytest.fixture(scope="module")
def source(tmp_path_factory, nano_path):
    """The bundled model, one group of which is very small."""
    folder = shutil.copytree(nano_path, tmp_path_factory.mktemp("flushed") / "source")
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if LAYER + "up_proj.weight" in tensors:
            tensors[LAYER + "up_proj.weight"][0, :16] *= TINY
            save_file(tensors, path, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def made(source):
    out = source.parent / "out"
    q.convert(source, out, "nvfp4a16", q.RunOptions(workers=1, verify=False))
    (out / RECEIPT).unlink()
    return out


def edited(made, out, change):
    shutil.copytree(made, out)
    tensors = load_file(out / WEIGHTS)
    change(tensors)
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    return out


def scale_by(tensors, module, factor):
    scale = tensors[LAYER + module + ".weight_scale"]
    scale.copy_((scale.float() * factor).to(scale.dtype))


def test_a_group_that_nobody_misses_is_a_note(made, source, tmp_path):
    """ModelOpt gives the small group a scale from 2^-9 on."""
    name = LAYER + "up_proj.weight"
    weights = {k: v for path in source.glob("*.safetensors") for k, v in load_file(path).items()}

    def change(tensors):
        scale = tensors[name + "_scale"]
        assert scale[0, 0] == 2.0**-6
        scale[0, 0] = 2.0**-9
        step = 2.0**-9 / tensors[name + "_global_scale"]
        tensors[name + "_packed"][0, :8] = encode_e2m1(weights[name][:1, :16], step)[0]

    report = q.verify(edited(made, tmp_path / "out", change), source)
    assert report.passed, report.failures
    assert report.notes == report.as_dict()["notes"]
    (note,) = report.notes
    assert note.startswith(f"{LAYER}up_proj.weight_scale has 1 scales below what Marlin keeps")


def test_what_we_write_needs_no_note(made, source):
    report = q.verify(made, source)
    assert report.passed, report.failures
    assert report.notes == []


def test_a_weight_that_is_small_beside_the_one_it_is_fused_with_is_named(made, tmp_path):
    out = edited(made, tmp_path / "out", lambda t: scale_by(t, "up_proj", 2.0**-13))
    (failure,) = (f for f in q.verify(out).failures if "Marlin" in f.problem)
    assert failure.tensor == f"{LAYER}up_proj.weight_scale"


def test_a_weight_whose_scales_are_all_small_is_kept_as_marlin_keeps_it(made, tmp_path):
    """Its largest scale leaves room for a factor, as where the global scale is 1."""
    out = edited(made, tmp_path / "out", lambda t: scale_by(t, "down_proj", 2.0**-7))
    report = q.verify(out)
    assert report.passed, report.failures
    assert report.notes == []


@pytest.mark.parametrize("value", [0.0, -1.0, torch.nan])
def test_a_scale_that_means_nothing_is_named(made, tmp_path, value):
    def change(tensors):
        tensors[LAYER + "up_proj.weight_scale"][3, 1] = value

    failures = q.verify(edited(made, tmp_path / "out", change)).failures
    assert [f.tensor for f in failures] == [f"{LAYER}up_proj.weight_scale"]


def test_a_scale_of_zero_is_right_where_all_codes_are(made, tmp_path):
    def change(tensors):
        tensors[LAYER + "up_proj.weight_scale"][3, 1] = 0
        tensors[LAYER + "up_proj.weight_packed"][3, 8:16] = 0x80

    report = q.verify(edited(made, tmp_path / "out", change))
    assert report.passed, report.failures
