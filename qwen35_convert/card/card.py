"""The card of an artifact: README.md with front matter for the hub, and what its receipt says.

Everything in it follows from the source, the recipe and the verdict: no time, no path of a machine,
not OUT's name. Licence and languages are the source's or absent; the base model is named where the
source has a name on the hub.

Source: the hub's model card specification (`base_model_relation`, `pipeline_tag`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from formats.tensor import TensorInfo
from qwen35_convert.card.front_matter import read_body, read_front_matter, word, words
from qwen35_convert.serving.artifact import Served
from qwen35_convert.serving.commands import starts

OURS = "qwen35"
CARRIED = ("license", "license_name", "license_link")
# Tasks of embedding models, which stay what they are.
EMBEDDING_TASKS = ("feature-extraction", "sentence-similarity")
GIGA = 10**9
COMMANDS = """```
qwen35 convert {sources} -o OUT --recipe recipe.yaml
qwen35 verify OUT --against {sources}
```"""
SERVING = """With this model at `{place}`:

```
{lines}
```
"""


@dataclass(frozen=True, slots=True)
class About:
    """What a card is about.

    title      what people call the source
    receipt    the artifact's, as far as it is known: recipe, source, adapter, verdict
    infos      its tensors
    quantized  whether weights are stored in codes
    vision     whether it has a vision tower
    library    what loads it, as the hub calls it
    sides      the source's side files
    served     how engines are given it, None if none serves it
    """

    title: str
    receipt: Mapping[str, Any]
    infos: Collection[TensorInfo]
    quantized: bool
    vision: bool
    library: str
    receipt_name: str
    sides: Mapping[str, bytes] = field(default_factory=dict)
    front: Mapping[str, Any] | None = None
    served: Served | None = None

    @property
    def said(self) -> Mapping[str, Any]:
        """The front matter that the source has, or is wanted instead."""
        front = read_front_matter(self.sides) if self.front is None else self.front
        metadata = self.recipe.get("export", {}).get("metadata") or {}
        metadata = {
            "language" if key == "languages" else key: value for key, value in metadata.items()
        }
        return {**front, **{key: value for key, value in metadata.items() if value}}

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The recipe."""
        return dict(self.receipt["recipe"])

    @property
    def sources(self) -> list[str]:
        """The repositories that it was made from, an adapter's first."""
        sides = (self.receipt.get(side) or {} for side in ("adapter", "source"))
        return [side["repo"] for side in sides if side.get("repo")]


def make_card(about: About) -> bytes:
    """Return the content of README.md."""
    front = yaml.safe_dump(dict(_front_matter(about)), sort_keys=False, allow_unicode=True)
    parts = [f"---\n{front}---\n", *_sections(about)]
    body = read_body(about.sides)
    if body:
        parts += ["---\n\nWhat follows is the card of the source.\n", body]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts).encode()


def _front_matter(about: About) -> Iterator[tuple[str, Any]]:
    said = about.said
    yield from ((key, text) for key in CARRIED if (text := word(said, key)))
    if languages := words(said, "language"):
        yield "language", languages
    if about.sources:
        yield "base_model", about.sources if about.sources[1:] else about.sources[0]
    if about.sources and about.quantized:
        yield "base_model_relation", "quantized"
    yield "pipeline_tag", _task(about)
    yield "library_name", about.library
    yield "tags", list(dict.fromkeys([*words(said, "tags"), OURS]))


def _task(about: About) -> str:
    task = word(about.said, "pipeline_tag")
    if task in EMBEDDING_TASKS:
        return str(task)
    return "image-text-to-text" if about.vision else "text-generation"


def _sections(about: About) -> Iterator[str]:
    recipe, source = about.recipe, about.receipt["source"]
    where = source.get("repo") or "a local folder"
    revision = f" at `{source['revision']}`" if source.get("revision") else ""
    yield f"# {word(about.said, 'name') or about.title}, {recipe['name']}"
    yield (
        f"Made with qwen35 {about.receipt['qwen35']} from {where}{revision}, "
        f"by the recipe below.{_merged(about)}"
    )
    yield "\n".join(_sizes(about.infos))
    yield "## Verification\n\n" + "\n".join(_proof(about.receipt.get("verdict")))
    yield f"## Recipe\n\n```yaml\n{_shown(recipe)}```"
    if about.served:
        yield "## Serving\n\n" + "\n".join(_serving(about.served))
    yield "## Commands\n\n" + COMMANDS.format(sources=_given(about))
    yield f"`{about.receipt_name}` lists every file of the source and of this model by SHA-256."


def _serving(artifact: Served) -> Iterator[str]:
    """Yield how engines are started on it, and why others are not."""
    every = starts(artifact)
    lines = "\n".join(start.pasted for start in every if not start.cannot)
    if lines:
        yield SERVING.format(place=artifact.path, lines=lines)
    versions = [start.least for start in every if start.least]
    if versions:
        yield f"Versions: {', '.join(versions)} or newer.\n"
    for start in every:
        yield from (f"- {start.engine}: {note}." for note in start.notes)
        if start.cannot:
            yield f"- {start.engine} does not load it: {start.cannot}."


def _merged(about: About) -> str:
    adapter = about.receipt.get("adapter")
    if adapter is None:
        return ""
    return f" The adapter (LoRA) {adapter.get('repo') or 'of a local folder'} is merged into it."


def _given(about: About) -> str:
    """Return how the sources are given on a command line."""
    base = about.receipt["source"].get("repo") or "SOURCE"
    adapter = about.receipt.get("adapter")
    return base if adapter is None else f"{adapter.get('repo') or 'ADAPTER'} --base {base}"


def _sizes(infos: Collection[TensorInfo]) -> Iterator[str]:
    """Yield a table of the stored types, the largest first."""
    counts, sizes = Counter[str](), Counter[str]()
    for info in infos:
        counts[info.dtype] += 1
        sizes[info.dtype] += info.nbytes
    yield "| stored as | tensors | GB |\n| --- | ---: | ---: |"
    for dtype, nbytes in sizes.most_common():
        yield f"| {dtype} | {counts[dtype]:,} | {nbytes / GIGA:.3f} |"
    yield f"| all | {counts.total():,} | {sizes.total() / GIGA:.3f} |"


def _proof(verdict: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield what was verified, and what was measured."""
    if verdict is None:
        yield "This model was not verified when it was made."
        return
    passed = "passed" if verdict["passed"] else "FAILED"
    yield f"Verified against its source at level {verdict['level']}: {passed}."
    measured = verdict.get("measured")
    if measured:
        yield (
            f"\nMean KL divergence {measured['kl_mean']} nats a token, top-1 agreement "
            f"{measured['top1']}, perplexity {measured['ppl_artifact']} (source "
            f"{measured['ppl_source']}), on {measured['tokens']} tokens."
        )


def _shown(recipe: Mapping[str, Any]) -> str:
    from qwen35_convert.recipe.recipe import build_recipe

    short = build_recipe(recipe).model_dump(mode="json", exclude_defaults=True)
    return yaml.safe_dump(short, sort_keys=False, allow_unicode=True)
