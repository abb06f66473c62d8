"""`verify --logits-cache`: the same digits without the source's layers, never another's."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qwen35_convert import api
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.errors import OutputError
from qwen35_convert.recipe.recipe import read_recipe
from qwen35_convert.text.tokens import DEFAULT_TEXT
from qwen35_convert.verification import logits_cache
from qwen35_convert.verification.logits import LogitsCheck, check_logits
from qwen35_convert.verification.logits_cache import LogitsCache

NO_PROOF = api.RunOptions(verify=False)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A source of our own, to be changed, and its artifact in FP8."""
    folder = tmp_path_factory.mktemp("cache")
    nano = Path(__file__).parents[2] / "data" / "nano-dense"
    shutil.copytree(nano, folder / "source")
    api.convert(folder / "source", folder / "fp8", read_recipe("fp8-block"), options=NO_PROOF)
    return folder / "source", folder / "fp8"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(DEFAULT_TEXT.read_text()[:1500])
    return str(path)


def measured(pair, text, cache=None):
    source, artifact = map(open_checkpoint, pair)
    check = LogitsCheck(text, cache=cache)
    return check_logits(artifact, source, check, lambda _: None)[0]


def kept(cache):
    return sorted(path.name for path in cache.iterdir())


def test_the_second_comparison_reads_no_layer_of_the_source(pair, text, tmp_path, layers_read):
    plain = measured(pair, text)
    first = measured(pair, text, tmp_path / "cache")
    assert layers_read == ["source", "fp8"] * 8
    layers_read.clear()
    second = measured(pair, text, tmp_path / "cache")
    assert layers_read == ["fp8"] * 4
    assert plain == first == second, "to the last digit"


def test_the_file_is_safetensors_of_every_layer_and_of_the_logits(pair, text, tmp_path):
    measured(pair, text, tmp_path / "cache")
    (file,) = (tmp_path / "cache").iterdir()
    tensors = load_file(file)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    logits = tensors.pop("logits")
    assert sorted(tensors) == [f"layers.{i}" for i in range(4)]
    assert len({stream.shape for stream in tensors.values()}) == 1
    tokens, config = len(tensors["layers.0"]), open_checkpoint(pair[0]).config
    assert logits.shape == (tokens * config.sizes["V"],)


def test_of_the_source_no_logits_are_computed_again(pair, text, tmp_path):
    cache = tmp_path / "cache"
    first = measured(pair, text, cache)
    (file,) = cache.iterdir()
    offset = file.stat().st_size - 4 * open_checkpoint(pair[0]).config.sizes["V"]
    with file.open("r+b") as opened:  # the last tokens' logits of another source
        opened.seek(offset)
        opened.write(bytes(400))
    assert measured(pair, text, cache)["kl_mean"] > first["kl_mean"]


def test_another_source_text_or_version_is_computed_anew(pair, text, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    measured(pair, text, cache)
    Path(text).write_text(DEFAULT_TEXT.read_text()[1500:3000])
    measured(pair, text, cache)
    assert len(kept(cache)) == 2
    weights = next(pair[0].glob("*.safetensors"))
    os.utime(weights, ns=(1, 1))
    measured(pair, text, cache)
    assert len(kept(cache)) == 3
    monkeypatch.setattr(logits_cache, "version", lambda: "0.0.0")
    measured(pair, text, cache)
    assert len(kept(cache)) == 4


def test_what_is_interrupted_is_not_kept(pair, text, tmp_path):
    source = open_checkpoint(pair[0])
    ids = torch.tensor([[1, 2, 3]])
    cache = LogitsCache.of(tmp_path / "cache", source, ids, "cpu")
    computed = iter(torch.zeros(4, 3, source.config.sizes["H"]))
    with suppress(KeyboardInterrupt), cache.opened() as keeping:
        next(keeping.streams(computed))
        assert len(kept(tmp_path / "cache")) == 1
        raise KeyboardInterrupt
    assert kept(tmp_path / "cache") == []


def test_a_folder_that_cannot_be_written_is_refused(pair, text, tmp_path, layers_read):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(OutputError, match="file"):
        measured(pair, text, tmp_path / "file")
    assert layers_read == []


def test_a_disk_too_small_is_refused_before_the_work(
    pair, text, tmp_path, layers_read, monkeypatch
):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(logits_cache.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OutputError, match="has 1000 free bytes, a cache of these logits needs"):
        measured(pair, text, tmp_path / "cache")
    assert layers_read == []
