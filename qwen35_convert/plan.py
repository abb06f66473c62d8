"""The plan: every row of the job, made from headers alone, before a byte is read or written.

    atoms -> keep or drop -> scheme by policy -> name in the target -> place in a shard

A row is independent of every other and may be run twice, which gives workers and resume. A plan
is pure: the same source and recipe give the same plan, and its `digest` ties a journal to both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from formats.checkpoint import Checkpoint
from formats.layout import Atom
from formats.names import HUB, TEXT, place
from formats.qwen35 import family
from formats.safetensors_file import build_header
from formats.tensor import DTYPE_BYTES, FormatError, TensorInfo
from quant.policy import Assignment, Policy, PolicyRule, Weight, assign
from quant.scheme import KEEP, QuantError, Scheme, get_scheme
from qwen35_convert.artifact_config import artifact_config
from qwen35_convert.recipe import Recipe, RecipeError

FUSED = {"gate_proj": ("gate_up_proj", 2, 0), "up_proj": ("gate_up_proj", 2, 1),
         "down_proj": ("down_proj", 1, 0)}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Output:
    """Where one encoded part of an atom goes: `nbytes` bytes from `offset` in tensor `name`.

    `suffix` is the scheme's name of the part: "" the weight, "_scale_inv" its scale.
    """

    suffix: str
    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Row:
    """The unit of streaming: one atom, its scheme, its outputs."""

    atom: Atom
    scheme: str
    outputs: tuple[Output, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Shard:
    """One output file: its tensors in file order, its header, each tensor's byte offset."""

    name: str
    infos: tuple[TensorInfo, ...]
    header: bytes
    offsets: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.header) + sum(info.nbytes for info in self.infos)


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole job."""

    recipe: Recipe
    rows: tuple[Row, ...]
    shards: tuple[Shard, ...]
    config: dict[str, Any]
    dropped: dict[str, int]
    notes: tuple[str, ...] = field(default=())

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every output tensor by name."""
        return {info.name: info for shard in self.shards for info in shard.infos}

    @property
    def nbytes(self) -> int:
        """Bytes of all output files with tensors."""
        return sum(shard.nbytes for shard in self.shards)

    def schemes(self) -> dict[str, Scheme]:
        """Return the schemes in use, ready to encode."""
        used = sorted({row.scheme for row in self.rows} - {KEEP})
        return make_schemes(used, self.recipe.quantize.scale)

    def digest(self, source: Checkpoint) -> str:
        """Return the SHA-256 that ties a journal to this plan and these source files."""
        files = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in source.read_files()]
        headers = [hashlib.sha256(shard.header).hexdigest() for shard in self.shards]
        said = [self.recipe.model_dump(mode="json"), self.config, headers, files]
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def make_schemes(names: Sequence[str], scale: str) -> dict[str, Scheme]:
    """Return schemes that may stand in one artifact.

    The official Qwen layout knows 128x128 blocks only; beside any other scheme, blocks take
    compressed-tensors' name for a scale.
    """
    suffix = "_scale_inv" if len(names) == 1 else "_scale"
    return {name: get_scheme(name, scale, suffix) for name in names}


def make_plan(source: Checkpoint, recipe: Recipe) -> Plan:
    """Plan a conversion. FormatError or QuantError for what cannot be converted."""
    layout = source.layout
    if layout.problems:
        raise FormatError(_all_problems(source))
    namespace = _namespace(source, recipe)
    atoms, dropped = _select(source, recipe, namespace)
    chosen = _choose_schemes(atoms, recipe)
    used = sorted({c.scheme for c in chosen} - {KEEP})
    schemes = make_schemes(used, recipe.quantize.scale)
    fused = _fuses_experts(source, recipe, atoms, chosen)
    namer = _Namer(namespace, schemes, fused=fused)
    rows = tuple(
        Row(atom, choice.scheme, namer.outputs(atom, choice.scheme), choice.reason)
        for atom, choice in zip(atoms, chosen, strict=True)
    )
    shards = tuple(_shard(namer.units, recipe.export.max_shard_size))
    config = artifact_config(
        source.config, namespace=namespace, tied=layout.tied,
        mtp_layers=layout.form.mtp_layers if recipe.mtp == "keep" else 0,
        rows=[(row.atom, row.scheme, row.outputs[0].name) for row in rows],
    )  # fmt: skip
    notes = (*source.notes, *layout.notes, *_plan_notes(source, recipe, chosen, fused=fused))
    return Plan(recipe, rows, shards, config, dropped, notes)


def _all_problems(source: Checkpoint) -> str:
    problems = source.layout.problems
    shown = "\n".join(str(problem) for problem in problems[:5])
    more = (
        f"\n  and   {len(problems) - 5} more; `qwen35 inspect` lists them"
        if len(problems) > 5
        else ""
    )
    return shown + more


def _namespace(source: Checkpoint, recipe: Recipe) -> str:
    layout = source.layout
    if recipe.layout == "same" and layout.kind == "next":
        raise FormatError(
            "the checkpoint is Qwen3-Next, whose fused in_proj_qkvz cannot stay as it is\n"
            "  fix   convert it with layout text: its tensors are split to Qwen3.5's"
        )
    wanted = recipe.layout if recipe.layout != "same" else HUB if layout.kind == HUB else TEXT
    if wanted == HUB and not (layout.form.vision and source.config.nested):
        raise FormatError(
            "the checkpoint has no vision tensors, which the vision-language class "
            "of layout hub expects\n  fix   use layout text"
        )
    return wanted


def _select(
    source: Checkpoint, recipe: Recipe, namespace: str
) -> tuple[list[Atom], dict[str, int]]:
    """Part the atoms that are kept from those the recipe drops (counted by group)."""
    gone = {"vision"} if namespace == TEXT else set()
    gone |= {"mtp"} if recipe.mtp == "drop" else set()
    heads = {"visual": "vision", "mtp": "mtp"}
    kept, dropped = [], dict.fromkeys(sorted(gone), 0)
    for atom in _canonical(source):
        group = heads.get(atom.hub.split(".", 1)[0])
        if group in gone:
            dropped[group] += 1
        else:
            kept.append(atom)
    return kept, {group: count for group, count in dropped.items() if count}


def _canonical(source: Checkpoint) -> Iterator[Atom]:
    """Yield the atoms in one order, whatever the layout: the same model gives the same files."""
    form = replace(source.layout.form, experts="split", mtp_experts="split", gdn_in="split")
    for slot in family(source.config.sizes, source.config.layer_types, form):
        yield source.layout.atoms[slot.name]


def _choose_schemes(atoms: Sequence[Atom], recipe: Recipe) -> list[Assignment]:
    """Apply the policy; what it refuses is the recipe's fault, not the input's."""
    rules = tuple(PolicyRule(rule.match, rule.scheme) for rule in recipe.quantize.rules)
    weights = [Weight(atom.name, atom.role, atom.shape, atom.group) for atom in atoms]
    try:
        return assign(Policy(recipe.quantize.scheme, rules), weights)
    except QuantError as error:
        raise RecipeError(str(error)) from None


def _fuses_experts(
    source: Checkpoint, recipe: Recipe, atoms: Sequence[Atom], chosen: Sequence[Assignment]
) -> bool:
    """Decide the form of the experts. FP8 experts are always apart, as in the official files."""
    quantised = any(
        atom.role == "expert" and choice.scheme != KEEP
        for atom, choice in zip(atoms, chosen, strict=True)
    )
    if recipe.experts == "fused" and quantised:
        raise RecipeError(
            "experts is fused, but quantised experts must be split: transformers does not decode "
            "gate_up_proj_scale_inv and would take the codes for values"
        )
    stored_fused = recipe.experts == "same" and source.layout.form.experts == "fused"
    return recipe.experts == "fused" or (stored_fused and not quantised)


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
    """Names outputs and gathers them, each weight with its scale, in the order of the atoms."""

    def __init__(self, namespace: str, schemes: dict[str, Scheme], *, fused: bool) -> None:
        self._namespace, self._schemes, self._fused = namespace, schemes, fused
        self.units: dict[str, list[TensorInfo]] = {}

    def outputs(self, atom: Atom, scheme: str) -> tuple[Output, ...]:
        """Return where the atom's parts go."""
        if atom.role == "expert" and self._fused:
            return (self._stacked(atom),)
        parts = [("", atom.dtype, atom.shape)]
        if scheme != KEEP:
            stored = self._schemes[scheme].stored(atom.shape)
            parts = [(part.suffix, part.dtype, part.shape) for part in stored]
        base = place(atom.hub, self._namespace)
        unit = {s: TensorInfo(base + s, dtype, shape) for s, dtype, shape in parts}
        self.units[base] = list(unit.values())
        return tuple(Output(s, info.name, 0, info.nbytes) for s, info in unit.items())

    def _stacked(self, atom: Atom) -> Output:
        """Return the atom's place in the stacked tensor of all experts, which grows with it."""
        parent, expert, projection = atom.name.rsplit(".", 2)
        fused, ways, half = FUSED[projection]
        name = f"{place(parent, self._namespace)}.{fused}"
        rows, columns = atom.shape
        self.units[name] = [TensorInfo(name, atom.dtype, (int(expert) + 1, ways * rows, columns))]
        nbytes = DTYPE_BYTES[atom.dtype] * rows * columns
        return Output("", name, (int(expert) * ways + half) * nbytes, nbytes)


def _shard(units: dict[str, list[TensorInfo]], limit: int) -> Iterator[Shard]:
    """Pack units in order into files of at most `limit` bytes; a larger unit gets its own."""
    packs: list[list[TensorInfo]] = [[]]
    size = 0
    for unit in units.values():
        nbytes = sum(info.nbytes for info in unit)
        if packs[-1] and size + nbytes > limit:
            packs.append([])
            size = 0
        packs[-1] += unit
        size += nbytes
    for i, pack in enumerate(packs):
        # wider types first keeps every tensor aligned to its own size
        infos = tuple(sorted(pack, key=lambda info: -DTYPE_BYTES[info.dtype]))
        header, offsets = build_header(infos, {"format": "pt"})
        yield Shard(shard_name(i, len(packs)), infos, header, tuple(offsets))


def shard_name(index: int, count: int) -> str:
    """Return the conventional file name of shard `index` (from 0) of `count`."""
    if count == 1:
        return "model.safetensors"
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"
