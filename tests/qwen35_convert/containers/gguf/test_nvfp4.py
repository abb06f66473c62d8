"""NVFP4 in GGUF: from BF16, from an NVFP4 checkpoint without a second rounding, and on."""

from __future__ import annotations

import shutil

import pytest
import torch

import qwen35_convert as q
from formats.gguf.file import GgufFile
from quant.opening import open_value
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.recipe.recipe import build_recipe
from tests.checkpoints import hub_config, make_weights, write_checkpoint
from tests.llama_cpp import LlamaCpp
from tests.runtime.models import NANO, distance, full
from tests.test_llama_cpp import KINDS, SIZES, load

pytestmark = pytest.mark.filterwarnings("ignore")
FAST = q.RunOptions(workers=1)
# llama.cpp rounds activations to eight bits, and a router of random experts then sends some tokens
# elsewhere; a swapped tensor or a scale that is left out makes it near 1.
ROUNDED = 0.3
CARRIED = "keep the source's NVFP4 codes and scales: no second rounding"


def gguf(scheme="nvfp4"):
    return build_recipe({"quantize": {"scheme": scheme}, "export": {"format": "gguf"}})


def four_bits(source, out):
    """Return an NVFP4 folder of a source, in the layout of engines."""
    assert q.convert(source, out, "nvfp4a16", FAST).report.passed
    return out


@pytest.fixture(scope="module", params=["nano", "dense", "moe"])
def folders(request, tmp_path_factory):
    """Return a BF16 source, what it is in NVFP4, and the GGUF files made from the two."""
    folder = tmp_path_factory.mktemp(request.param)
    source = NANO
    if request.param != "nano":
        config = hub_config(moe=request.param == "moe", **SIZES, **KINDS[request.param])
        source = folder / "source"
        write_checkpoint(source, config, make_weights(config))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(NANO / name, source / name)
    middle = four_bits(source, folder / "nvfp4a16")
    made = {}
    for name, start in (("bf16", source), ("codes", middle)):
        made[name] = folder / f"{name}.gguf"
        done = q.convert(start, made[name], gguf(), FAST)
        assert done.report.passed, done.report.failures
        made[f"{name} notes"] = done.plan.notes
    return source, middle, made


def values(path):
    source = open_checkpoint(path)
    return {
        name: open_value(source, atom).exact(0, atom.shape[0])
        for name, atom in source.layout.atoms.items()
        if atom.scheme.startswith("nvfp4")
    }


def test_codes_of_a_checkpoint_are_taken_as_they_are(folders):
    _, middle, made = folders
    ours, theirs = values(made["codes"]), values(middle)
    assert theirs
    assert theirs.keys() <= ours.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=2.0**-22, atol=0)
    assert any(CARRIED in note for note in made["codes notes"])
    assert not any(CARRIED in note for note in made["bf16 notes"])


def test_a_scale_stands_beside_every_weight(folders):
    infos = GgufFile(folders[2]["bf16"]).infos
    weights = [info for info in infos.values() if info.dtype == "NVFP4"]
    for info in weights:
        scale = infos[info.name.removesuffix(".weight") + ".scale"]
        assert (scale.dtype, scale.shape) == ("F32", tuple(info.shape[:-2]) or (1,))
    assert len(weights) > 10


@pytest.mark.parametrize("name", ["bf16", "codes"])
def test_a_file_is_proven_without_its_receipt(folders, name):
    source, middle, made = folders
    made[name].with_name(f"{name}.gguf.receipt.json").unlink(missing_ok=True)
    for origin in [source] if name == "bf16" else [source, middle]:
        report = q.verify(made[name], origin)
        assert report.passed, report.failures


def test_llama_cpp_computes_what_our_runtime_does(folders):
    ids = list(range(3, 120))
    for name in ("bf16", "codes"):
        path = folders[2][name]
        with LlamaCpp(path, len(ids)) as theirs:
            found = torch.from_numpy(theirs.logits(ids))
        assert distance(found, full(load(path), ids)) < ROUNDED


def test_a_file_goes_on_to_another_gguf_without_rounding_and_to_a_folder(folders, tmp_path):
    first = folders[2]["codes"]
    again = q.convert(first, tmp_path / "again.gguf", gguf(), FAST)
    assert again.report.passed, again.report.failures
    ours, theirs = values(tmp_path / "again.gguf"), values(first)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    folder = q.convert(first, tmp_path / "folder", "bf16-split", FAST)
    assert folder.report.passed, folder.report.failures
