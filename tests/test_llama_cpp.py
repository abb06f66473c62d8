"""llama.cpp loads the GGUF files that we write, and computes from them what we compute.

    F32     the logits, and the drafts of the MTP block, of our runtime and of transformers
    others  the predictions of our runtime on the same file, decoded

Between them lie only llama.cpp's roundings of activations: none for F32, BF16 for BF16, and eight
bits per value for the block types.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import Qwen3_5ForConditionalGeneration

from qwen35_convert import api, measuring
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.recipe.recipe import Recipe, build_recipe
from qwen35_convert.text.tokens import DEFAULT_TEXT
from runtime.load import load_model
from runtime.model import hidden_states
from runtime.serve.engine import generate
from runtime.state import Batch, Span
from runtime.weights import Model
from tests.checkpoints import hub_config, make_weights, write_checkpoint
from tests.llama_cpp import LlamaCpp
from tests.llama_cpp_vision import encode_image
from tests.runtime.models import (
    NANO,
    distance,
    draft_logits,
    full,
    pools_for,
    transformers_logits,
)

pytestmark = pytest.mark.filterwarnings("ignore")

# Float32 sums in another order: transformers' own, in float32 and float64, are 1e-5 apart.
FLOAT32 = 5e-5
# RMS of the difference over RMS of our logits; a swapped, shifted or lost tensor makes it near 1
ROUNDED = {"bf16": 0.03, "q8_0": 0.2, "q4_k_m": 0.2}
COUNT = 120
LOW = ("iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs")
# of the last two layers of four: each kind of linear stands in one of them
LINEARS = {
    "dense": (
        "layers.[23].mlp.*_proj",
        "layers.[23].self_attn.?_proj",
        "layers.[23].linear_attn.*_qkv",
    ),
    "moe": ("layers.[23].mlp.experts.*", "layers.[23].linear_attn.*_qkv"),
}
# rows of whole K blocks where columns are H, and of none where they are heads of the delta rule
SIZES = {
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "vocab_size": 2048,
}  # fmt: skip
KINDS = {
    "dense": {"intermediate_size": 512, "tie_word_embeddings": True},
    "moe": {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 512},
}


def gguf(mix: str, **more: str) -> Recipe:
    return build_recipe({"quantize": {"scheme": mix}, "export": {"format": "gguf"}, **more})


@pytest.fixture(scope="module", params=["nano", *KINDS])
def source(request, tmp_path_factory) -> Path:
    """The bundled model, and generated ones with three value heads per key head."""
    if request.param == "nano":
        return NANO
    config = hub_config(moe=request.param == "moe", **SIZES, **KINDS[request.param])
    folder = tmp_path_factory.mktemp(request.param) / request.param
    write_checkpoint(folder, config, make_weights(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(NANO / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    """Return the source's GGUF file of a mix, with or without MTP."""
    folder = tmp_path_factory.mktemp("gguf")

    def make(mix: str, mtp: str = "keep") -> Path:
        out = folder / f"{mix}-{mtp}.gguf"
        if not out.exists():
            api.convert(source, out, gguf(mix, mtp=mtp), options=api.RunOptions(verify=False))
        return out

    return make


@pytest.fixture(scope="module")
def model(source) -> Model:
    return load(source)


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return tokenizer(NANO).encode(DEFAULT_TEXT.read_text(encoding="utf-8")).ids[:COUNT]


def load(path: Path) -> Model:
    return load_model(open_checkpoint(path), "cpu", torch.float32)


def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def near(got: np.ndarray, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape
    assert distance(torch.from_numpy(got), expected) < FLOAT32


@torch.no_grad()
def drafts(model: Model, ids: list[int]) -> torch.Tensor:
    """Return what our MTP head expects two after each token but the last."""
    state = pools_for(model, mtp_layers=1)
    batch, after = (Batch.pack([], [Span(part, 0, 0, 0)], "cpu") for part in (ids[:-1], ids[1:]))
    hidden = hidden_states(model, state.pools(), batch)
    return draft_logits(model, state.mtp_pools(), after, hidden)


@pytest.mark.parametrize("mtp", ["keep", "drop"])
def test_f32_has_the_logits_of_our_runtime_and_of_transformers(source, converted, model, ids, mtp):
    with LlamaCpp(converted("f32", mtp), COUNT) as theirs:
        found = theirs.logits(ids)
    near(found, full(model, ids))
    near(found, transformers_logits(source, ids))


def test_the_mtp_block_drafts_what_our_runtime_drafts(converted, model, ids):
    with LlamaCpp(converted("f32"), COUNT, mtp=True) as theirs:
        near(theirs.drafts(ids), drafts(model, ids))
        near(theirs.logits(ids), full(model, ids))


def test_it_goes_on_with_the_same_text(converted, model, ids):
    with LlamaCpp(converted("f32"), 64) as theirs:
        assert theirs.greedy(ids[:20], 32) == list(generate(model, ids[:20], 32))


@pytest.mark.parametrize("mtp", ["keep", "drop"])
@pytest.mark.parametrize("mix", list(ROUNDED))
def test_it_predicts_what_we_predict_from_the_same_file(converted, ids, mix, mtp):
    ours = full(load(converted(mix, mtp)), ids)
    with LlamaCpp(converted(mix, mtp), COUNT, mtp=mtp == "keep") as theirs:
        found = torch.from_numpy(theirs.logits(ids))
        assert mtp == "drop" or np.isfinite(theirs.drafts(ids)).all()
    assert (found - ours).norm() < ROUNDED[mix] * ours.norm()


@pytest.fixture(scope="module")
def imatrix(tmp_path_factory) -> Callable[[Path], Path]:
    """Return an importance matrix of a source."""

    @cache
    def make(source: Path) -> Path:
        out = tmp_path_factory.mktemp("imatrix") / "imatrix.gguf"
        measuring.imatrix(source, out, chunks=1)
        return out

    return make


@pytest.mark.parametrize("kind", LOW)
def test_it_predicts_what_we_predict_from_two_and_three_bits(source, imatrix, ids, kind, tmp_path):
    if source == NANO:
        pytest.skip("its rows are not whole super-blocks")
    rules = [{"match": match, "scheme": kind} for match in LINEARS[source.name]]
    quantize = {"scheme": "q8_0", "imatrix": str(imatrix(source)), "rules": rules}
    recipe = build_recipe({"quantize": quantize, "export": {"format": "gguf"}})
    done = api.convert(source, tmp_path / "m.gguf", recipe)
    assert done.report.passed, done.report.failures
    assert {t.dtype for t in open_checkpoint(tmp_path / "m.gguf").infos().values()} > {kind.upper()}
    ours = full(load(tmp_path / "m.gguf"), ids)
    with LlamaCpp(tmp_path / "m.gguf", COUNT) as theirs:
        found = torch.from_numpy(theirs.logits(ids))
    assert (found - ours).norm() < ROUNDED["q4_k_m"] * ours.norm()


# composed (NFC): unlike the tokenizer of the hub, llama.cpp does not normalise
STRANGE = (
    "<|im_start|>user\nHi<|im_end|>\n",
    "  two  spaces\n\n\n\ttab\r\nend ",
    "x==y; //!? ...",
    "",
    "don't I'LL we've 12345",
    "na\u00efve \u00dcber q\u0301 \u4f60\u597d\uff01",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \U0001f44d\U0001f3fd",
    "\u202fnarrow\u3000wide\u00a0hard",
)


@pytest.fixture(scope="module")
def nano_file(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("nano") / "nano.gguf"
    api.convert(NANO, out, gguf("q8_0"), options=api.RunOptions(verify=False))
    return out


@pytest.mark.parametrize("text", STRANGE)
def test_text_becomes_the_same_tokens(nano_file, text):
    with LlamaCpp(nano_file, 64) as theirs:
        assert theirs.tokenize(text) == tokenizer(NANO).encode(text, add_special_tokens=False).ids


def test_a_file_cut_short_is_refused_with_a_reason(nano_file, tmp_path):
    """The driver must not take a load that failed for one that did not."""
    short = tmp_path / "short.gguf"
    short.write_bytes(nano_file.read_bytes()[:100_000])
    with pytest.raises(ValueError, match=r"short\.gguf: .+"):
        LlamaCpp(short, 64)


# GELU is read from an F16 table there
VISION = 1e-3
PATCH, MERGE = 16, 2


def patches(pixels_YXC: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the image as transformers wants it: patches in blocks of MERGE x MERGE, and the grid.

    The same frame twice, as of a video, each pixel in -1..1.
    """
    rows, columns = (side // PATCH for side in pixels_YXC.shape[:2])
    frames = (torch.from_numpy(pixels_YXC).permute(2, 0, 1) / 127.5 - 1).expand(2, -1, -1, -1)
    blocks = frames.reshape(2, 3, rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH)
    flat = blocks.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(rows * columns, -1)
    return flat, torch.tensor([[1, rows, columns]])


@pytest.mark.parametrize("size", [(128, 128), (96, 160)], ids=["8x8", "6x10"])
def test_an_image_is_encoded_as_by_transformers(tmp_path, size):
    api.convert(
        NANO,
        tmp_path / "nano.gguf",
        gguf("f32", vision="keep"),
        options=api.RunOptions(verify=False),
    )
    pixels = np.random.default_rng(35).integers(0, 256, (*size, 3), dtype=np.uint8)
    with LlamaCpp(tmp_path / "nano.gguf", 64) as model:
        found = encode_image(model, tmp_path / "mmproj-nano.gguf", pixels)
    model = Qwen3_5ForConditionalGeneration.from_pretrained(NANO, dtype=torch.float32)
    flat, grid = patches(pixels)
    with torch.no_grad():
        expected = model.model.visual(flat, grid_thw=grid).pooler_output
    assert distance(torch.from_numpy(found), expected) < VISION
