"""The JSON Schema of a recipe file, for editors: made from the model that reads it.

It is published as recipes/recipe.schema.json; a recipe names it in its first line:

    # yaml-language-server: $schema=recipe.schema.json

Trap: pydantic knows the type of a value, not what a validator takes besides (a size such as 5GB) or
refuses (a scheme that is not known); `TEXTS` and `NAMES` say that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from formats.stored import KEEP
from quant.ggml import kinds
from quant.mix.choose import FILE_TYPES
from quant.registry import SCHEMES
from qwen35_convert.recipe.files import EXTENDS
from qwen35_convert.recipe.parts import FORMATS
from qwen35_convert.recipe.recipe import Recipe

DRAFT = "https://json-schema.org/draft/2020-12/schema"
TYPES = [name for dtype in kinds.WRITABLE for name in (dtype.lower(), dtype)]
EXPONENT = {"type": "string", "pattern": r"^[0-9]{1,4}e[+-]?[0-9]{1,3}$"}
SIZE = {
    "type": "string",
    "pattern": r"^\s*[0-9]{1,15}(\.[0-9]{1,15})?\s*([KMGTkmgt]?[Bb]|[KMGkmg][Ii][Bb])?\s*$",
}
ABOUT = {
    EXTENDS: "A bundled recipe or a file in the same folder whose keys this one changes.",
    "name": "Name in the receipt; the file's own name if it is left out.",
    "layout": "text: model.layers.*, *ForCausalLM. hub: the vision-language namespace. "
    "same: as the source.",
    "experts": "One tensor per expert, or fused ones.",
    "mtp": "Keep or drop the multi-token prediction head.",
    "vision": "Keep or drop the vision tower; layout text drops it, the others keep it.",
    "only": "Convert only tensors that match this glob, for inspection.",
    "quantize": "How weights are stored.",
    "quantize.scheme": "Scheme of linear layers; of a GGUF file the mix, such as q4_k_m.",
    "quantize.scale": "Type of FP8 scales; pow2 is exact in every loader.",
    "quantize.group": "Columns that share a scale, where the scheme has a choice.",
    "quantize.symmetric": "Whether integers have no zero points.",
    "quantize.dialect": "Whose names and config are written.",
    "quantize.method": "How codes are chosen: nearest; sweep, scales that suit a text; gptq.",
    "quantize.kv_cache": "fp8: also scales of keys and values, for engines that cache them in FP8.",
    "quantize.calibrate": "The calibration text for sweep, gptq and input scales.",
    "quantize.calibrate.text": "A text file; default is the bundled text.",
    "quantize.calibrate.tokens": "How many tokens of it.",
    "quantize.rules": "Exceptions, in order: the first glob that matches a tensor's name decides.",
    "quantize.rules.match": "A glob over tensor names, such as layers.*.mlp.down_proj.",
    "quantize.rules.scheme": "Scheme of the tensors that match; keep leaves them as they are.",
    "quantize.mix": "Who chooses the types of a GGUF file.",
    "quantize.imatrix": "An importance matrix, as qwen35 imatrix and llama.cpp make it.",
    "export": "How the artifact is stored.",
    "export.format": "A folder of safetensors, or a GGUF file.",
    "export.max_shard_size": "Largest file, such as 5GB.",
    "export.chat_template": "The text of a chat template to use instead of the source's.",
    "export.metadata": "Metadata to use instead of what the source's README.md says.",
    "export.metadata.name": "Name of the model.",
    "export.metadata.author": "Author.",
    "export.metadata.version": "Its version.",
    "export.metadata.organization": "Organisation.",
    "export.metadata.description": "One-sentence description.",
    "export.metadata.quantized_by": "Who quantised it.",
    "export.metadata.license": "SPDX identifier of its licence, or other.",
    "export.metadata.license_name": "Name of a licence without an SPDX identifier.",
    "export.metadata.license_link": "Where to find that licence.",
    "export.metadata.url": "Its page.",
    "export.metadata.repo_url": "Its repository.",
    "export.metadata.tags": "Tags.",
    "export.metadata.languages": "Languages, such as en.",
    "verify": "How the artifact is verified against its source.",
    "verify.level": "structure: headers and config. tensors: also every byte. "
    "logits: also predictions.",
    "verify.text": "Text of level logits; default is the bundled text.",
    "verify.max_kl": "Maximum mean KL divergence, in nats per token; raises the level to logits.",
    "verify.min_top1": "Minimum top-1 agreement, 0 to 1; raises the level to logits.",
    "bench": "What qwen35 bench times.",
    "bench.prefill": "Prompt lengths.",
    "bench.batch": "Batch sizes of decode steps.",
}
NAMES: dict[str, Iterable[str]] = {
    "quantize.scheme": (KEEP, *SCHEMES, *FILE_TYPES),
    "quantize.rules.scheme": (KEEP, *SCHEMES, *TYPES),
    "export.format": FORMATS,
}
TEXTS = {"export.max_shard_size": SIZE, "verify.max_kl": EXPONENT, "verify.min_top1": EXPONENT}
# What a default is that the schema cannot say: it follows from another key, or from the file.
DEPENDS = ("name", "vision")


def recipe_schema() -> dict[str, Any]:
    """Return the schema, as JSON values."""
    schema = Recipe.model_json_schema()
    definitions = schema.pop("$defs")
    properties = {EXTENDS: {"type": "string"}, **schema.pop("properties")}
    return {
        "$schema": DRAFT,
        "title": "qwen35 recipe",
        "description": "How qwen35 converts a Qwen3.5-family checkpoint.",
        "type": "object",
        "additionalProperties": False,
        "properties": _described(properties, definitions, ""),
    }


def _described(
    properties: dict[str, Any], definitions: dict[str, Any], path: str
) -> dict[str, Any]:
    """Return properties with what they mean, and what they refer to in their place."""
    described = {}
    for key, value in properties.items():
        where = f"{path}{key}"
        inner = _widened(_inlined(value, definitions, f"{where}."), where)
        left_out = {"title"} | ({"default"} if where in DEPENDS or "properties" in inner else set())
        described[key] = {"description": ABOUT[where], **_without(inner, left_out)}
    return described


def _widened(value: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a schema with what a validator takes besides, and the names that it knows."""
    if where in NAMES:
        value = {"enum": list(dict.fromkeys(NAMES[where]))} | _without(value, ("type",))
    if where in TEXTS:
        plain = _without(value, ("default", "title", "anyOf"))
        choices = value.get("anyOf", [plain])
        value = {"anyOf": [*choices, TEXTS[where]]} | _without(value, (*plain, "anyOf"))
    return value


def _without(value: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: one for key, one in value.items() if key not in keys}


def _inlined(value: Any, definitions: dict[str, Any], path: str) -> Any:
    """Return a schema with its references resolved; recipes have no section inside itself."""
    if isinstance(value, list):
        return [_inlined(one, definitions, path) for one in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        section = definitions[value["$ref"].rpartition("/")[2]]
        kept = _without(section, ("title", "description", "properties"))
        rest = _without(value, ("$ref",))
        return kept | {"properties": _described(section["properties"], definitions, path)} | rest
    return {key: _inlined(one, definitions, path) for key, one in value.items()}
