"""The plan of a GGUF file: the same atoms, stacked, transformed and typed as llama.cpp reads them.

    atoms -> keep or drop -> GGUF name -> type by the mix -> place in a shard

Experts of a projection are one tensor, so an expert's item fills one entry of it. Value heads are
tiled, norms are stored as 1 + w, A_log as -exp (formats.gguf.names). With `vision: keep` the
vision tower becomes a second file, `mmproj-NAME.gguf`, in the same run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from formats.checkpoint import Checkpoint
from formats.family.layout import Atom
from formats.family.ops import Shape
from formats.family.roles import VISION
from formats.gguf.checkpoint import CONTAINER
from formats.gguf.header import Kv
from formats.gguf.metadata import size_label, text_metadata, title
from formats.gguf.names import gguf_name, ops_to_gguf
from formats.gguf.pooling import pooling_notes, pooling_type
from formats.gguf.rope import rope_notes
from formats.gguf.tokenizer import tokenizer_metadata
from formats.tensor import TensorInfo
from quant.errors import QuantError
from quant.fourbit.ggml_grids import CODES
from quant.fourbit.point_fields import FIELDS
from quant.ggml.kinds import CASTS
from quant.ggml_types import ggml_type
from quant.mix.choose import FILE_TYPES, Choice, choose
from quant.mix.tensors import Facts, MixTensor
from quant.part import Part
from quant.stored import scheme_of
from qwen35_convert.card.front_matter import read_front_matter, words
from qwen35_convert.containers.gguf.about import about_of, asked_about, base_model_pairs
from qwen35_convert.containers.gguf.entry import Entry
from qwen35_convert.containers.gguf.importance import (
    Importance,
    calibration_pairs,
    check_needed,
    read_importance,
)
from qwen35_convert.containers.gguf.mmproj import mmproj_part, read_generation
from qwen35_convert.containers.gguf.shards import gguf_shards
from qwen35_convert.errors import RecipeError
from qwen35_convert.planning.calibrated import (
    alone_notes,
    calibration_notes,
    check_calibrated,
    method_of,
)
from qwen35_convert.planning.plan import Item, Output, Plan
from qwen35_convert.planning.select import check_whole, faults_dropped, policy_rules, select
from qwen35_convert.planning.side_files import check_sides, side_notes
from qwen35_convert.recipe.parts import NEAREST
from qwen35_convert.recipe.recipe import Recipe
from qwen35_convert.recipe.unused import unused_notes


def make_gguf_plan(source: Checkpoint, recipe: Recipe, stem: str) -> Plan:
    """Plan a GGUF file that is to be named `stem`.gguf.

    RecipeError for a mix or a rule that cannot be; FormatError for what GGUF cannot hold.
    """
    gone = {group for group in ("mtp", "vision") if getattr(recipe, group) == "drop"}
    atoms, dropped = select(source, recipe, gone)
    tensors = _tensors(source, [atom for atom in atoms if atom.role != VISION])
    shapes = {name: _shape(stacked) for name, stacked in tensors.items()}
    importance = read_importance(recipe, tensors, shapes)
    chosen = _choose_types(source, recipe, tensors, shapes, importance)
    check_sides(source)
    parts_of = {n: ggml_type(chosen[n].type).parts(n, shape) for n, shape in shapes.items()}
    infos = [part.info for stored in parts_of.values() for part in stored]
    items = tuple(_items(recipe, tensors, parts_of, chosen))
    written = [(item.atom, item.scheme) for item in items]
    check_calibrated(recipe, written, [name.lower() for name in (*CODES, *FIELDS)])
    types = {name: choice.type for name, choice in chosen.items()}
    check_needed(recipe, importance.known, tensors, types)
    pairs, tokenizer_notes = _metadata(source, recipe, infos)
    pairs += (*importance.pairs, *calibration_pairs(recipe))
    shards = gguf_shards(infos, pairs, stem, recipe.export.max_shard_size)
    more, vision = mmproj_part(source, recipe, [a for a in atoms if a.role == VISION], stem)
    return Plan(
        container=CONTAINER,
        recipe=recipe,
        items=items + more,
        shards=(*shards, *vision),
        dropped=dropped,
        notes=(
            *source.notes,
            *source.layout.notes,
            *faults_dropped(source, gone),
            *_notes(source, tensors, chosen),
            *side_notes(source),
            *unused_notes(recipe),
            *tokenizer_notes,
            *importance.notes,
            *calibration_notes(recipe, written),
            *alone_notes(recipe, written),
        ),
        importance=importance.weights,
        title=title(source.name),
    )


def _part(atom: Atom, num_layers: int, sizes: Mapping[str, int]) -> Entry:
    name, index = gguf_name(atom.hub, num_layers)
    return Entry(atom, name, index, ops_to_gguf(atom.role, sizes))


def _tensors(source: Checkpoint, atoms: Sequence[Atom]) -> dict[str, list[Entry]]:
    """Gather the parts of every tensor, in the order in which tensors first appear.

    RecipeError for experts that are not all there: GGUF stacks them.
    """
    num_layers, sizes = len(source.config.layer_types), source.config.sizes
    tensors: dict[str, list[Entry]] = {}
    for atom in atoms:
        part = _part(atom, num_layers, sizes)
        tensors.setdefault(part.name, []).append(part)
    for name, stacked in tensors.items():
        if stacked[0].index is not None:
            check_whole(name, len(stacked), sizes["E"])
    return tensors


def _shape(parts: Sequence[Entry]) -> Shape:
    """Return the shape of a tensor: of its one part, or of the stack of them."""
    return parts[0].shape if parts[0].index is None else (len(parts), *parts[0].shape)


def _choose_types(
    source: Checkpoint,
    recipe: Recipe,
    tensors: Mapping[str, Sequence[Entry]],
    shapes: Mapping[str, Shape],
    importance: Importance,
) -> dict[str, Choice]:
    """Apply the mix and the rules; what they refuse is the recipe's fault."""
    sizes, choice_of = source.config.sizes, recipe.quantize
    listed = [
        MixTensor(name, parts[0].atom.role, shapes[name], tuple(part.atom.name for part in parts))
        for name, parts in tensors.items()
    ]
    weighed = choice_of.imatrix is not None
    facts = Facts(
        num_layers=len(source.config.layer_types),
        num_experts=sizes.get("E", 0),
        gqa=sizes["NH"] // sizes["NKV"],
        tied=source.layout.tied,
        imatrix=weighed,
        unknown=frozenset(tensors.keys() - importance.known if weighed else ()),
    )
    rules = policy_rules(recipe)
    try:
        return choose(
            choice_of.scheme, listed, facts, rules, like_llama_cpp=choice_of.mix == "llama.cpp"
        )
    except QuantError as error:
        raise RecipeError(str(error)) from None


def _items(
    recipe: Recipe,
    tensors: Mapping[str, Sequence[Entry]],
    parts_of: Mapping[str, Sequence[Part]],
    chosen: Mapping[str, Choice],
) -> Iterator[Item]:
    for name, entries in tensors.items():
        scheme, reason = ggml_type(chosen[name].type), chosen[name].reason
        for entry in entries:
            outputs = tuple(_output(p, entry.index, len(entries)) for p in parts_of[name])
            method = method_of(recipe, entry.atom, scheme)
            why = reason if method == NEAREST else f"{reason}, {method}"
            yield Item(entry.atom, scheme, outputs, why, entry.ops)


def _output(part: Part, index: int | None, count: int) -> Output:
    """Return where one entry of a stack of so many goes."""
    nbytes = part.info.nbytes // count
    return Output(part.key, part.info.name, (index or 0) * nbytes, nbytes)


def _metadata(
    source: Checkpoint, recipe: Recipe, infos: Sequence[TensorInfo]
) -> tuple[list[Kv], tuple[str, ...]]:
    """Return every pair but those of the importance matrix, and notes on the tokenizer's."""
    mtp_layers = source.layout.form.mtp_layers if recipe.mtp == "keep" else 0
    card = read_front_matter(source.sides)
    about = {"name": title(source.name), "size_label": size_label(infos)}
    text = text_metadata(
        source.config,
        about=about | about_of(card) | asked_about(recipe.export.metadata),
        file_type=FILE_TYPES[recipe.quantize.scheme],
        mtp_layers=mtp_layers,
        generation=read_generation(source),
        pooling=pooling_type(source.sides),
    )
    text += base_model_pairs(words(card, "base_model"))
    tokens, notes = tokenizer_metadata(source.sides, source.config.sizes["V"], source.config.raw)
    return text + tokens, notes


def _is_carried(part: Entry, choice: Choice) -> bool:
    """Whether an atom's codes are taken as they are."""
    return ggml_type(choice.type).carries(scheme_of(part.atom), part.ops)


def _notes(
    source: Checkpoint, tensors: Mapping[str, Sequence[Entry]], chosen: Mapping[str, Choice]
) -> Iterator[str]:
    again = set()
    for name, parts in tensors.items():
        if parts[0].atom.quantized and not _is_carried(parts[0], chosen[name]):
            again.add(chosen[name].type)
    carried = sum(_is_carried(parts[0], chosen[name]) for name, parts in tensors.items())
    if carried:
        yield f"{carried} tensors keep the source's NVFP4 codes and scales: no second rounding"
    if again - CASTS.keys():
        yield (
            f"the source is {source.layout.quantized}; its weights are dequantised and "
            "quantised again: two roundings"
        )
    elif again:
        types = " and ".join(sorted(again))
        yield f"the source is {source.layout.quantized}; its weights are dequantised to {types}"
    yield from rope_notes(source.config)
    yield from pooling_notes(source.sides)
    for name in tensors:
        if chosen[name].fallback:
            yield f"{name}: {chosen[name].reason}"
