"""The plan of a folder of safetensors: names of a namespace, schemes by policy, shards.

atoms -> keep or drop -> scheme by policy -> name in the target -> place in a shard
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.family.layout import Atom
from formats.family.names import HUB, TEXT, WITHOUT_HEAD, place
from formats.family.pieces import EXPERT_STACKS
from formats.family.roles import EXPERT
from formats.safetensors.folder import CONTAINER
from formats.safetensors.header import build_header
from formats.stored import KEEP
from formats.tensor import DTYPE_BYTES, TensorInfo
from quant.errors import QuantError
from quant.plain import Plain
from quant.policy import Assignment, Policy, Weight, assign
from quant.registry import get_schemes
from quant.scheme import Scheme
from qwen35_convert.containers.safetensors.cache_scales import cache_notes, plan_cache_scales
from qwen35_convert.containers.safetensors.config import artifact_config
from qwen35_convert.containers.safetensors.side_files import files_beside
from qwen35_convert.errors import RecipeError
from qwen35_convert.planning.calibrated import (
    calibration_notes,
    check_calibrated,
    method_of,
)
from qwen35_convert.planning.plan import Item, Output, Plan, Shard, pack
from qwen35_convert.planning.ranks import rank_notes
from qwen35_convert.planning.restored import kept_dtype, model_dtype
from qwen35_convert.planning.select import check_whole, faults_dropped, policy_rules, select
from qwen35_convert.planning.side_files import check_sides, image_notes, side_notes, token_notes
from qwen35_convert.recipe.parts import NEAREST, NO_CACHE
from qwen35_convert.recipe.recipe import Recipe
from qwen35_convert.recipe.unused import unused_notes


def make_folder_plan(source: Checkpoint, recipe: Recipe, *, widened: bool) -> Plan:
    """Plan a folder of safetensors; `widened`: the source has what it keeps in wider types."""
    layout = source.layout
    namespace = _namespace(source, recipe)
    gone = _dropped(recipe, namespace)
    atoms, dropped = select(source, recipe, gone)
    chosen = _choose_schemes(atoms, recipe)
    check_sides(source)
    fused = _fuses_experts(source, recipe, atoms, chosen)
    namer = _Namer(WITHOUT_HEAD[namespace] if layout.headless else namespace, fused=fused)
    items = tuple(_items(recipe, atoms, chosen, namer, model_dtype(source) if widened else None))
    written = [(item.atom, item.scheme) for item in items]
    check_calibrated(recipe, written)
    for (name, ways), count in namer.stacked.items():
        check_whole(name, count, ways * source.config.sizes["E"])
    scales = plan_cache_scales(recipe, source, namer.written)
    for weight, info in scales:
        namer.units[weight].append(info)
    shards = tuple(_shard(namer.units, recipe.export.max_shard_size))
    mtp_layers = layout.form.mtp_layers if recipe.mtp == "keep" else 0
    config = artifact_config(
        source.config,
        namespace=namespace,
        tied=None if layout.headless else layout.tied,
        mtp_layers=mtp_layers,
        rows=namer.written,
        fp8_cache=_caches(recipe),
    )
    return Plan(
        container=CONTAINER,
        recipe=recipe,
        items=items,
        shards=shards,
        dropped=dropped,
        notes=(
            *_source_notes(source, gone, namespace),
            *_plan_notes(source, recipe, chosen, fused=fused),
            *rank_notes(written),
            *unused_notes(recipe),
            *calibration_notes(recipe, written),
            *cache_notes(scales, recipe, mtp=mtp_layers > 0),
        ),
        files=files_beside(source, config, shards),
        described=config,
    )


def _items(
    recipe: Recipe,
    atoms: Sequence[Atom],
    chosen: Sequence[Assignment],
    namer: _Namer,
    usual: str | None,
) -> Iterator[Item]:
    """Yield what is to be done with each atom; `usual`: the type of what is kept."""
    used = sorted({choice.scheme for choice in chosen} - {KEEP})
    schemes = get_schemes(used, recipe.quantize.choices, alone=not _caches(recipe))
    for atom, choice in zip(atoms, chosen, strict=True):
        scheme = schemes.get(choice.scheme) or Plain(kept_dtype(atom, usual))
        method = method_of(recipe, atom, scheme)
        reason = choice.reason if method == NEAREST else f"{choice.reason}, {method}"
        yield Item(atom, scheme, namer.outputs(atom, scheme), reason)


def _caches(recipe: Recipe) -> bool:
    """Whether scales of keys and values are written."""
    return recipe.quantize.kv_cache != NO_CACHE


def _namespace(source: Checkpoint, recipe: Recipe) -> str:
    layout = source.layout
    if recipe.layout == "same" and layout.kind == "next":
        raise FormatError(
            "the checkpoint",
            "is Qwen3-Next, whose fused in_proj_qkvz cannot stay as it is",
            fix="--set layout=text splits its tensors into Qwen3.5's",
        )
    hub = layout.kind == HUB and recipe.vision == "keep"
    wanted = recipe.layout if recipe.layout != "same" else HUB if hub else TEXT
    if wanted == HUB and not (layout.form.vision and source.config.nested):
        raise FormatError(
            "the checkpoint",
            "has no vision tensors",
            "a vision tower, which the class of layout hub has",
            "--set layout=text --set vision=drop",
        )
    return wanted


def _dropped(recipe: Recipe, namespace: str) -> set[str]:
    gone = {"vision"} if namespace == TEXT else set()
    return gone | ({"mtp"} if recipe.mtp == "drop" else set())


def _choose_schemes(atoms: Sequence[Atom], recipe: Recipe) -> list[Assignment]:
    """Apply the policy; what it refuses is the recipe's fault, not the input's."""
    weights = [Weight(atom.name, atom.role, atom.shape, atom.group) for atom in atoms]
    quantize = recipe.quantize
    policy = Policy(quantize.scheme, policy_rules(recipe), quantize.choices)
    try:
        return assign(policy, weights)
    except QuantError as error:
        raise RecipeError(str(error)) from None


def _fuses_experts(
    source: Checkpoint, recipe: Recipe, atoms: Sequence[Atom], chosen: Sequence[Assignment]
) -> bool:
    """Decide the form of the experts. FP8 experts are always apart, as in the official files."""
    quantised = any(
        atom.role == EXPERT and choice.scheme != KEEP
        for atom, choice in zip(atoms, chosen, strict=True)
    )
    if recipe.experts == "fused" and quantised:
        raise RecipeError(
            "experts is fused, but quantised experts must be split: transformers does not decode "
            "gate_up_proj_scale_inv and would take the codes for values"
        )
    stored_fused = recipe.experts == "same" and source.layout.form.experts == "fused"
    return recipe.experts == "fused" or (stored_fused and not quantised)


def _source_notes(source: Checkpoint, gone: set[str], namespace: str) -> Iterator[str]:
    yield from source.notes
    yield from source.layout.notes
    yield from faults_dropped(source, gone)
    yield from side_notes(source)
    yield from token_notes(source)
    if namespace == HUB:
        yield from image_notes(source)


def _plan_notes(
    source: Checkpoint, recipe: Recipe, chosen: Sequence[Assignment], *, fused: bool
) -> Iterator[str]:
    again = {choice.scheme for choice in chosen} - {KEEP}
    if source.layout.quantized and again:
        yield (
            f"the source is {source.layout.quantized}; its weights are dequantised and quantised "
            "again: two roundings"
        )
    elif source.layout.quantized:
        yield f"the source is {source.layout.quantized}; its weights are dequantised to BF16"
    if recipe.experts == "same" and source.layout.form.experts == "fused" and not fused:
        yield "fused experts are split: quantised ones are stored one by one, as in official files"
    if any(choice.name == "lm_head" and choice.scheme != KEEP for choice in chosen):
        yield "lm_head is quantised: vLLM's fp8 method does not load an FP8 head"


class _Namer:
    """Names outputs and gathers them, each weight with its parts, in the order of the atoms.

    written  (atom, scheme, name of its weight) of everything
    """

    def __init__(self, namespace: str, *, fused: bool) -> None:
        self._namespace, self._fused = namespace, fused
        self.units: dict[str, list[TensorInfo]] = {}
        self.written: list[tuple[Atom, Scheme, str]] = []
        self.stacked: Counter[tuple[str, int]] = Counter()

    def outputs(self, atom: Atom, scheme: Scheme) -> tuple[Output, ...]:
        """Return where the atom's parts go."""
        if atom.role == EXPERT and self._fused:
            return (self._stacked(atom, scheme),)
        base = place(atom.hub, self._namespace)
        parts = scheme.parts(base, atom.shape)
        self.written.append((atom, scheme, base))
        self.units[base] = [part.info for part in parts]
        return tuple(Output(part.key, part.info.name, 0, part.info.nbytes) for part in parts)

    def _stacked(self, atom: Atom, scheme: Scheme) -> Output:
        """Return the atom's place in the stacked tensor of all experts, which grows with it."""
        parent, expert, projection = atom.name.rsplit(".", 2)
        stack, ways, piece = EXPERT_STACKS[projection]
        name = f"{place(parent, self._namespace)}.{stack}"
        rows, columns = atom.shape
        (whole,) = scheme.parts(name, (int(expert) + 1, ways * rows, columns))
        self.units[name] = [whole.info]
        self.written.append((atom, scheme, name))
        self.stacked[name, ways] += 1
        nbytes = whole.info.nbytes // ((int(expert) + 1) * ways)
        return Output(whole.key, name, (int(expert) * ways + piece) * nbytes, nbytes)


def _shard(units: dict[str, list[TensorInfo]], limit: int) -> Iterator[Shard]:
    """Return files of at most `limit` bytes, a weight and its scale in one."""
    packs = pack(units.values(), limit)
    for i, tensors in enumerate(packs):
        # wider types first keeps every tensor aligned to its own size
        infos = tuple(sorted(tensors, key=lambda info: -DTYPE_BYTES[info.dtype]))
        header, offsets = build_header(infos, {"format": "pt"})
        nbytes = len(header) + sum(info.nbytes for info in infos)
        yield Shard(shard_name(i, len(packs)), infos, header, tuple(offsets), nbytes)


def shard_name(index: int, count: int) -> str:
    """Return the conventional file name of shard `index` (from 0) of `count`."""
    if count == 1:
        return "model.safetensors"
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"
