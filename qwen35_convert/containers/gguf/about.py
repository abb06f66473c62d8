"""What a model card says, as keys under `general.` of a GGUF file: records, which no engine obeys.

    license, license_name, license_link    general.license, .license.name, .license.link
    tags and pipeline_tag                  general.tags
    language                               general.languages
    base_model                             general.base_model.count, .0.name, .0.organization, ...

Source: gguf-py's `Metadata.apply_metadata_heuristic` and `set_gguf_meta_model` at b11434.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from formats.gguf.header import Kv
from formats.gguf.metadata import title
from qwen35_convert.card.front_matter import word, words
from qwen35_convert.recipe.parts import Metadata

HUB = "https://huggingface.co"
LICENCE = ("license", "license_name", "license_link")


def about_of(card: Mapping[str, Any]) -> dict[str, str | Sequence[str]]:
    """Return what a card's front matter says, by key under `general.`."""
    texts = {key.replace("license_", "license."): word(card, key) for key in LICENCE}
    return {
        **{key: text for key, text in texts.items() if text},
        "tags": words(card, "tags", "pipeline_tag"),
        "languages": words(card, "language"),
    }


def asked_about(metadata: Metadata | None) -> dict[str, str | Sequence[str]]:
    """Return what a recipe wants to be said, by key under `general.`."""
    fields = {} if metadata is None else metadata.model_dump()
    return {key.replace("license_", "license."): value for key, value in fields.items() if value}


def base_model_pairs(names: Sequence[str]) -> list[Kv]:
    """Return the pairs of the models that this one was made from: `owner/name` on the hub."""
    models = [name.split("/") for name in names if name.count("/") == 1]
    pairs = [Kv("general.base_model.count", "uint32", len(models))] if models else []
    for i, (owner, name) in enumerate(models):
        about = {
            "name": title(name),
            "organization": title(owner),
            "repo_url": f"{HUB}/{owner}/{name}",
        }
        pairs += [
            Kv(f"general.base_model.{i}.{key}", "string", text) for key, text in about.items()
        ]
    return pairs
