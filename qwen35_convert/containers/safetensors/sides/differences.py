"""How what lies beside the tensors differs from what lies beside the source's.

Weights alone are right, as some tools write them. A folder that has a tokenizer, a template or a
preprocessor has all that the source has, each meaning the same wherever its fields stand; and no
file of its own that an engine obeys.
"""

from __future__ import annotations

import filecmp
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.quant_methods import MODELOPT
from formats.safetensors.hf_quant import HF_QUANT
from formats.side_names import (
    ADDED_TOKENS,
    GENERATION,
    IMAGES,
    LEGACY_TEMPLATE,
    MERGES,
    PROCESSOR,
    SPECIAL_TOKENS,
    TEMPLATE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    VIDEOS,
    VOCAB,
)
from qwen35_convert.containers.safetensors.sides.embedder import alike, embedder_names
from qwen35_convert.containers.safetensors.sides.engine_files import OTHERS, engine_files
from qwen35_convert.containers.safetensors.sides.generation import generation
from qwen35_convert.containers.safetensors.sides.processors import (
    images,
    nests,
    processor,
    videos,
)
from qwen35_convert.containers.safetensors.sides.quantiser_files import repeats_block
from qwen35_convert.containers.safetensors.sides.reader import Sides
from qwen35_convert.containers.safetensors.sides.template import (
    EVERYWHERE,
    NAMED,
    TOKENIZERS,
    has_template,
    named_differences,
    template_of,
)
from qwen35_convert.containers.safetensors.sides.tokenizer import (
    added_ids,
    merges,
    tokenizer,
    vocabulary,
)
from qwen35_convert.containers.safetensors.sides.tokenizer_config import (
    special_tokens,
    tokenizer_config,
)
from qwen35_convert.difference import first
from qwen35_convert.failure import Failure
from qwen35_convert.planning.side_files import check_side

Judge = Callable[[Sides, Sides], Iterator[str]]
# What holds a file against all that the source says; one that is the source's needs none of it.
JUDGES: Mapping[str, tuple[Judge, ...]] = {
    TOKENIZER: (tokenizer,),
    TOKENIZER_CONFIG: (tokenizer_config, template_of(TOKENIZER_CONFIG)),
    SPECIAL_TOKENS: (special_tokens,),
    ADDED_TOKENS: (added_ids,),
    VOCAB: (vocabulary,),
    MERGES: (merges,),
    TEMPLATE: (template_of(TEMPLATE),),
    LEGACY_TEMPLATE: (template_of(LEGACY_TEMPLATE),),
    GENERATION: (generation,),
    IMAGES: (images,),
    VIDEOS: (videos,),
    PROCESSOR: (processor, template_of(PROCESSOR)),
}
MISSING = "is missing: the source has it"


def side_differences(artifact: Checkpoint, source: Checkpoint) -> Iterator[Failure]:
    """Yield what is missing, what means something else, and what only the artifact has."""
    ours, theirs = Sides(artifact), Sides(source)
    for name in JUDGES:
        if ours.has(name) and ours.content(name) != theirs.content(name):
            yield from _judged(name, ours, theirs)
    yield from _missing(ours, theirs)
    yield from _strange(ours, theirs)


def _judged(name: str, ours: Sides, theirs: Sides) -> Iterator[Failure]:
    """Yield how a file differs, or why no engine reads it."""
    try:
        check_side(name, ours.content(name) or b"")
        sentences = [sentence for judge in JUDGES[name] for sentence in judge(ours, theirs)]
    except FormatError as error:
        sentences = [error.without_fix().removeprefix(name).lstrip(": ")]
    yield from (Failure(name, sentence) for sentence in first(iter(sentences)))


def _missing(ours: Sides, theirs: Sides) -> Iterator[Failure]:
    """Yield what the source has; transformers writes generation_config.json with bare weights."""
    if not any(ours.has(name) for name in JUDGES if name != GENERATION):
        return
    for name in (TOKENIZER, TOKENIZER_CONFIG, GENERATION):
        if theirs.has(name) and not ours.has(name):
            yield Failure(name, MISSING)
    try:
        yield from _missing_template(ours, theirs)
        yield from _missing_preprocessors(ours, theirs)
        yield from (Failure(*failure) for failure in named_differences(ours, theirs))
        for name in embedder_names(theirs.checkpoint):
            if not ours.has(name):
                yield Failure(name, MISSING)
    except FormatError:
        return  # said of the file that it is


def _missing_template(ours: Sides, theirs: Sides) -> Iterator[Failure]:
    """Tokenizers do not look into the files of processors."""
    for files in (TOKENIZERS, EVERYWHERE):
        where = has_template(theirs, files)
        if where is not None:
            if has_template(ours, files) is None:
                yield Failure(where, MISSING)
            return


def _missing_preprocessors(ours: Sides, theirs: Sides) -> Iterator[Failure]:
    """Ask for them where images are input: a model of text needs none."""
    if not ours.checkpoint.layout.form.vision:
        return
    for name in (IMAGES, VIDEOS):
        if theirs.has(name) and not ours.has(name) and not nests(ours, name):
            yield Failure(name, MISSING)


def _strange(ours: Sides, theirs: Sides) -> Iterator[Failure]:
    """Yield files that engines obey and the source has not, or has with other fields."""
    for name in engine_files(ours.checkpoint.folder, OTHERS):
        if fnmatchcase(name, NAMED) or _is_own(name, ours.checkpoint):
            continue  # compared as templates, or with config.json
        if repeats_block(ours.checkpoint, name):
            continue
        there, same = _in_source(name, ours, theirs)
        if not same:
            comes = next(OTHERS[pattern] for pattern in OTHERS if fnmatchcase(name, pattern))
            odd = "is not the source's" if there else "is not in the source"
            yield Failure(name, f"{odd}, and {comes}")


def _is_own(name: str, artifact: Checkpoint) -> bool:
    """Whether it is the file of the quantiser that config.json names, which the census judges."""
    block = artifact.config.quantization or {}
    return name == HF_QUANT and block.get("quant_method") == MODELOPT


def _in_source(name: str, ours: Sides, theirs: Sides) -> tuple[bool, bool]:
    """Return whether the source has a file of this name, and whether it says the same."""
    got, expected = ours.content(name), theirs.content(name)
    if got is not None and expected is not None:
        return True, alike(got, expected)
    artifact, source = ours.checkpoint, theirs.checkpoint
    other = source.folder / name
    there = source.container == artifact.container and other.is_file()
    return there, there and filecmp.cmp(artifact.folder / name, other, shallow=False)
