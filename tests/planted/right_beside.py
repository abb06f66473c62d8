"""Right artifacts of sources with other files beside: cards, code, a template in the config."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from qwen35_convert import api
from qwen35_convert.recipe.recipe import read_recipe
from tests.planted.artifact import RECEIPT, Workshop
from tests.planted.right_sides import save_again
from tests.planted.side_field_faults import GENERATION, TEMPLATE, TOKENIZER_CONFIG

Make = Callable[[Workshop, Path], tuple[Path, Path]]


def makers() -> Iterator[tuple[str, str, Make]]:
    """Yield kind, name and what makes the artifact, of those whose source is another."""
    for name, (prepare, change) in SOURCES.items():
        yield "side files", name, partial(_of_source, prepare=prepare, change=change)


def _of_source(
    workshop: Workshop,
    folder: Path,
    prepare: Callable[[Path], object],
    change: Callable[[Path, Path], object],
) -> tuple[Path, Path]:
    """Convert a model with other files beside, and change what came of it."""
    source, out = folder / "source", folder / "out"
    shutil.copytree(workshop.model("wide"), source)
    prepare(source)
    api.convert(source, out, read_recipe("fp8-block"))
    change(source, out)
    return out, source


def _document(source: Path) -> None:
    (source / "README.md").write_text("# The model as it was\n")
    (source / "LICENSE").write_text("free\n")


def _document_anew(_source: Path, out: Path) -> None:
    """Write the card of what was made; the receipt knows only the source's."""
    (out / "README.md").write_text("# The model in FP8\n")
    (out / "LICENSE").unlink()


def _document_without_receipt(source: Path, out: Path) -> None:
    _document_anew(source, out)
    (out / RECEIPT).unlink()


def _without_generation(source: Path) -> None:
    (source / GENERATION).unlink()


def _generation_of_config(_source: Path, out: Path) -> None:
    """Write what transformers makes of config.json where nothing else says how to generate."""
    (out / RECEIPT).unlink()
    said = {"_from_model_config": True, "eos_token_id": 500, "transformers_version": "5.24.0"}
    (out / GENERATION).write_text(json.dumps(said))


def _with_code(source: Path) -> None:
    (source / "modeling_own.py").write_text("pass\n")
    (source / "modules.json").write_text("[]")


def _code_too(source: Path, out: Path) -> None:
    """Keep what a fine-tuned model comes with."""
    (out / RECEIPT).unlink()
    for name in ("modeling_own.py", "modules.json"):
        shutil.copyfile(source / name, out / name)


def _of_hub(source: Path) -> None:
    """Say what published files do: every special token, the template in the config."""
    config = json.loads((source / TOKENIZER_CONFIG).read_bytes())
    tokens = [token["content"] for token in config["added_tokens_decoder"].values()]
    config |= {"additional_special_tokens": tokens, "image_token": "<|image_pad|>"}
    config |= {"chat_template": (source / TEMPLATE).read_text(), "pretokenize_regex": "x"}
    (source / TEMPLATE).unlink()
    (source / TOKENIZER_CONFIG).write_text(json.dumps(config, indent=4))


def _saved_again(source: Path, out: Path) -> None:
    (out / RECEIPT).unlink()
    save_again(source, out)


SOURCES: dict[str, tuple[Callable[[Path], object], Callable[[Path, Path], object]]] = {
    "a card written anew": (_document, _document_anew),
    "a card written anew without receipt": (_document, _document_without_receipt),
    "generation as config.json says": (_without_generation, _generation_of_config),
    "code of the source": (_with_code, _code_too),
    "the hub's, saved by transformers": (_of_hub, _saved_again),
}
