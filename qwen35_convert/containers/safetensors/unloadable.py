"""What an engine does not load or misreads, where there is no source to compare with.

Side files are held to what a source must be to be converted. Classes with vision read
mrope_section, whose sizes vLLM asserts to come to half of the rotated width. mlx-lm and older
llama.cpp read full_attention_interval instead of layer_types.
"""

from __future__ import annotations

from collections.abc import Iterator

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.family.config import Config
from formats.family.config_fields import interval_types
from formats.side_names import CONFIG
from qwen35_convert.containers.safetensors.mixed_types import mixed_types
from qwen35_convert.failure import Failure
from qwen35_convert.planning.side_files import check_sides
from qwen35_convert.planning.token_names import disagreements

INTERVAL = "full_attention_interval"


def unloadable(artifact: Checkpoint) -> Iterator[Failure]:
    """Yield the first side file, if any, and tokens, types and fields that disagree."""
    unread = list(_sides(artifact))
    yield from unread
    yield from () if unread else (Failure(*one) for one in disagreements(artifact))
    yield from mixed_types(artifact)
    yield from _sections(artifact.config)
    yield from _interval(artifact.config)


def _sides(artifact: Checkpoint) -> Iterator[Failure]:
    try:
        check_sides(artifact)
    except FormatError as error:
        name, *rest = error.without_fix().split(" ", 1)
        yield Failure(name.removesuffix(":"), " ".join(rest))


def _sections(config: Config) -> Iterator[Failure]:
    stated, half = config.rope.sections, int(config.sizes["HD"] * config.rope.partial) // 2
    if config.vision and any(stated) and sum(stated) != half:
        what = f"mrope_section is {list(stated)}, together {sum(stated)}, expected {half}"
        yield Failure(CONFIG, f"{what}, half of what is rotated of a head")


def _interval(config: Config) -> Iterator[Failure]:
    """Name an interval that means other layers; where none means them, any may stand there."""
    types, stated = config.layer_types, config.text.get(INTERVAL)
    meant = (i for i in range(1, len(types) + 1) if interval_types(i, len(types)) == types)
    expected = next(meant, None)
    if expected is None or type(stated) is not int or stated < 1:
        return  # of another kind, which is said elsewhere
    if interval_types(stated, len(types)) != types:
        yield Failure(CONFIG, f"{INTERVAL} is {stated!r:.80}, expected {expected}: see layer_types")
