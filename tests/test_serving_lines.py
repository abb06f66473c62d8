"""The line that `inspect` shows for transformers is run, and predicts what the source predicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import qwen35_convert as q

logging.set_verbosity_error()
pytestmark = pytest.mark.filterwarnings("ignore")
TEXT = Path(__file__).parent.parent / "qwen35_convert" / "text" / "default_text.txt"
# Mean KL that a recipe costs this small model, with room for transformers' arithmetic.
COSTS = {
    "bf16-split": 0.01,
    "fp8-block": 0.05,
    "fp8-block-hub": 0.05,
    "fp8-block-kv8": 0.05,
    "fp8-channel": 0.05,
    "int8": 0.05,
    "int4-g32": 0.25,
    "nvfp4a16": 0.25,
    "mxfp4a16": 0.25,
}


@pytest.fixture(scope="module")
def ids(nano_path: Path) -> torch.Tensor:
    tokens = Tokenizer.from_file(str(nano_path / "tokenizer.json")).encode(TEXT.read_text()).ids
    return torch.tensor([tokens[:256]])


@torch.no_grad()
def predictions(model, ids: torch.Tensor) -> torch.Tensor:
    return model.eval()(input_ids=ids).logits.float().log_softmax(-1)


@pytest.mark.parametrize("recipe", COSTS)
def test_transformers_predicts_what_the_source_predicts(recipe, nano_path, ids, tmp_path):
    out = tmp_path / "it's an artifact"
    q.convert(nano_path, out, recipe, q.RunOptions(verify=False))
    shown = q.inspect(out).serving["engines"]
    (line,) = (engine["line"] for engine in shown if engine["engine"] == "transformers")
    names: dict[str, Any] = {}
    exec(line, names)
    source = predictions(AutoModelForCausalLM.from_pretrained(nano_path, dtype="auto"), ids)
    theirs = predictions(names["model"], ids)
    assert (source.exp() * (source - theirs)).sum(-1).mean() < COSTS[recipe]
