"""Recognise a checkpoint by its tensors, not by its class name, and account for every one.

The result is a list of atoms: the tensors of the family at their finest (one projection of one
expert), each with the stored tensor it comes from and the operations that cut it out. Converting,
verifying and running all read atoms, so every layout is understood once, here.

Coverage is total both ways: a stored tensor without a place is a problem, and so is a place
without a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from formats.family.config import Config
from formats.family.dialects import (
    GGUF,
    MLX,
    dialect_of,
    ops_to_hub,
    rename_gguf,
    stored_shape,
)
from formats.family.ops import Op, Regroup, Rows, Shape, Unstack, shape_after
from formats.family.rules import FUSED_GROUPS, RULES, Form, Slot, family, template
from formats.safetensors.names import (
    FP32_HOLDER,
    HUB,
    TEXT,
    Problem,
    leftover,
    rename,
    split_scales,
)
from formats.tensor import DTYPE_BYTES, TensorInfo

SOURCE_TYPES = ("BF16", "F16", "F32")
FP8_TYPES = ("F8_E4M3",)
SCALE_TYPES = ("BF16", "F16", "F32", "F8_E8M0")
BLOCK = 128


@dataclass(frozen=True, slots=True)
class Atom:
    """One tensor of the family: where it is stored and how it is cut out.

    `dtype` is its type once decoded; `scale` names the stored scale of an FP8 weight.
    """

    name: str
    hub: str
    role: str
    shape: Shape
    dtype: str
    stored: str
    ops: tuple[Op, ...] = ()
    scale: str | None = None

    @property
    def group(self) -> str | None:
        """Key of the linears that engines fuse with this one."""
        return fused_group(self.name, self.role)


@dataclass(frozen=True, slots=True)
class Layout:
    """What a checkpoint is, and its atoms in the family's order."""

    kind: str
    form: Form
    atoms: dict[str, Atom]
    tied: bool
    quantized: str | None
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def fused_group(name: str, role: str) -> str | None:
    """Return the group key: the parent module and the fused name, as `layers.3.self_attn.qkv`."""
    kind = FUSED_GROUPS.get(role)
    if kind == "experts":
        return name.rsplit(".", 2)[0]
    return f"{name.rsplit('.', 1)[0]}.{kind}" if kind else None


def recognise(infos: Mapping[str, TensorInfo], config: Config, *, gguf: bool = False) -> Layout:
    """Match stored tensors to the family; problems are collected, not raised.

    gguf  the tensors come from a GGUF file, under its names
    """
    leftovers = [found for info in infos.values() if (found := leftover(info)) and not gguf]
    foreign = {problem.tensor for problem in leftovers}
    kept = {name: info for name, info in infos.items() if name not in foreign}
    names, collisions = rename_gguf(kept, len(config.layer_types)) if gguf else rename(kept)
    held = {hub: infos[stored] for hub, stored in names.items()}
    weights, scales = split_scales(held)
    form, dialect = _form(weights, config), GGUF if gguf else dialect_of(held, config)
    slots = {slot.hub: slot for slot in family(config.sizes, config.layer_types, form)}
    problems = [*leftovers, *collisions, *_coverage(weights, slots, held, config)]
    problems += _lost_scales(held, scales)
    atoms: dict[str, Atom] = {}
    for hub, slot in slots.items():
        if hub not in held:
            continue
        match = _Match(slot, held[hub], held[scales[hub]] if hub in scales else None, dialect)
        checked = _check(match, config)
        problems += checked
        if not checked:
            atoms |= {atom.name: atom for atom in _cut(match, config)}
    tied, tie_notes, tie_problems = _tied(config, form)
    if dialect == MLX and form.mtp_layers:
        problems.append(MLX_MTP)
    return Layout(
        kind=dialect if dialect in (MLX, GGUF) else _kind(held, config, form),
        form=form,
        atoms=atoms,
        tied=tied,
        quantized=_quantized(atoms, infos),
        notes=tie_notes + _notes(held, config, form, mlx=dialect == MLX),
        problems=problems + tie_problems,
    )


@dataclass(frozen=True, slots=True)
class _Match:
    """A place in the family and the stored tensor that fills it."""

    slot: Slot
    info: TensorInfo
    scale: TensorInfo | None
    dialect: str


MLX_MTP = Problem(
    "mtp.norm.weight",
    "comes from an MLX checkpoint, whose MTP norms may or may not be shifted",
    "convert the original checkpoint",
)


def _form(weights: list[str], config: Config) -> Form:
    keys = {template(name) for name in weights}
    rules = {key for key, _ in keys}
    heads = {name.split(".", 1)[0] for name in weights}
    mtp = {numbers[0] for key, numbers in keys if key.startswith("mtp.layers.#.")}
    return Form(
        experts=_experts(rules, "layers.#."),
        mtp_experts=_experts(rules, "mtp.layers.#."),
        mtp_layers=max(len(mtp), 1) if "mtp" in heads else 0,
        vision="visual" in heads and config.vision is not None,
        head="lm_head.weight" in rules,
        gdn_in="fused" if "layers.#.linear_attn.in_proj_qkvz.weight" in rules else "split",
    )


def _experts(rules: set[str], prefix: str) -> str:
    if prefix + "mlp.experts.gate_up_proj" in rules:
        return "fused"
    return "mlx" if prefix + "mlp.switch_mlp.gate_proj.weight" in rules else "split"


def _coverage(
    weights: list[str], slots: Mapping[str, Slot], held: Mapping[str, TensorInfo], config: Config
) -> Iterator[Problem]:
    present = set(weights)
    again = "download the checkpoint again"
    for hub in slots:
        if hub not in present:
            other = ", or remove the other mtp tensors" if hub.startswith("mtp.") else ""
            yield Problem(hub, "is missing", again + other)
    for hub in weights:
        if hub not in slots:
            reason = _unplaced(hub, config)
            yield Problem(held[hub].name, reason, "remove it, or correct config.json")


MIXERS = {"linear_attn": "linear_attention", "self_attn": "full_attention"}


def _unplaced(hub: str, config: Config) -> str:
    """Say why a tensor has no place, by the field of config.json that denies it one."""
    key, numbers = template(hub)
    if key not in RULES:
        return "is no tensor of the Qwen3.5 family"
    if key.startswith("visual."):
        if config.vision is None:
            return "is visual, but config.json has no vision_config"
        return f"is in block {numbers[0]}, but {config.fields['vD']} is {config.sizes['vD']}"
    if key.startswith("layers.#."):
        reason = _wrong_layer(key, numbers[0], config.layer_types)
        if reason:
            return reason
    if ".experts.#." in key and config.moe and numbers[1] >= config.sizes["E"]:
        return f"is expert {numbers[1]}, but {config.fields['E']} is {config.sizes['E']}"
    kind = "mixture of experts" if config.moe else "dense model"
    return f"has no place beside the other tensors in a {kind} of this config.json"


def _wrong_layer(key: str, layer: int, layer_types: tuple[str, ...]) -> str | None:
    if layer >= len(layer_types):
        return f"is in layer {layer}, but num_hidden_layers is {len(layer_types)}"
    mixer = next((MIXERS[s] for s in key.split(".") if s in MIXERS), None)
    if mixer in (None, layer_types[layer]):
        return None
    return f"has no place in a layer that layer_types calls {layer_types[layer]}"


def _lost_scales(held: Mapping[str, TensorInfo], scales: Mapping[str, str]) -> Iterator[Problem]:
    for weight, scale in scales.items():
        if weight not in held:
            reason = "scales a weight that is not there"
            yield Problem(held[scale].name, reason, "download the checkpoint again")


def _check(match: _Match, config: Config) -> list[Problem]:
    info, expected = match.info, stored_shape(match.slot, match.info, match.dialect)
    if 0 in info.shape:
        return [
            Problem(
                info.name,
                f"is empty (shape {list(info.shape)})",
                "save the checkpoint again with all ranks gathered",
            )
        ]
    if info.shape != expected:
        return [_wrong_shape(match, expected, config)]
    blocks = match.dialect == GGUF and info.dtype not in DTYPE_BYTES
    if info.dtype in SOURCE_TYPES or blocks:
        return _scale_without_fp8(info, match.scale)
    if info.dtype in FP8_TYPES:
        return _fp8_scale(match)
    known = ", ".join((*SOURCE_TYPES, *FP8_TYPES))
    problem = f"has dtype {info.dtype}, expected one of {known}"
    return [Problem(info.name, problem, "convert a BF16 checkpoint")]


def _wrong_shape(match: _Match, expected: Shape, config: Config) -> Problem:
    shape, symbols = match.info.shape, match.slot.rule.shape
    problem = (
        f"has shape {list(shape)}, expected {list(expected)} ({symbols})\n"
        f"  from  config.json: {config.source_of(symbols)}"
    )
    if sorted(shape) != sorted(expected):
        remedy = "use the config.json that belongs to these tensors"
        return Problem(match.info.name, problem, remedy)
    order = "it is transposed" if shape == expected[::-1] else "its axes are in another order"
    return Problem(match.info.name, f"{problem}\n  why   {order}", "save it in the hub's order")


def _scale_without_fp8(info: TensorInfo, scale: TensorInfo | None) -> list[Problem]:
    if scale is None:
        return []
    return [
        Problem(
            scale.name,
            f"scales {info.name}, which is {info.dtype}, not FP8",
            "remove the scale, or restore the FP8 weight",
        )
    ]


def _fp8_scale(match: _Match) -> list[Problem]:
    info, scale = match.info, match.scale
    if len(info.shape) != 2 and match.slot.rule.role not in EXPERT_PIECES:
        return [
            Problem(
                info.name,
                f"is FP8 with shape {list(info.shape)}, expected a matrix",
                "convert a BF16 checkpoint",
            )
        ]
    if scale is None:
        return [
            Problem(
                info.name,
                "is FP8 without a scale: its values are unknown",
                "restore the scale, or convert the BF16 checkpoint",
            )
        ]
    grids = scale_grids(info.shape)
    restore = "restore the scale that belongs to this weight"
    if scale.shape not in grids.values():
        known = " or ".join(f"{list(grid)} ({kind})" for kind, grid in grids.items())
        problem = f"has shape {list(scale.shape)}, expected {known}"
        return [Problem(scale.name, problem, restore)]
    if scale.dtype not in SCALE_TYPES:
        problem = f"has dtype {scale.dtype}, expected one of {', '.join(SCALE_TYPES)}"
        return [Problem(scale.name, problem, restore)]
    return []


def scale_grids(shape: Shape) -> dict[str, Shape]:
    """Return the shapes an FP8 weight's scale may have, by the scheme that has it."""
    lead, rows, columns = shape[:-2], shape[-2], shape[-1]
    return {
        "fp8-block": (*lead, -(-rows // BLOCK), -(-columns // BLOCK)),
        "fp8-channel": (*lead, rows, 1),
        "fp8-tensor": (1,),
        "fp8-scalar": (),
    }


def _cut(match: _Match, config: Config) -> Iterator[Atom]:
    """Yield the atoms of one stored tensor."""
    info = match.info
    scale = match.scale.name if match.scale else None
    for hub, role, pieces in _pieces(match.slot, config.sizes):
        ops = pieces + ops_to_hub(role, match.slot, info, match.dialect, config.sizes)
        yield Atom(
            name=hub.removesuffix(".weight"),
            hub=hub,
            role=role,
            dtype=_decoded(info.dtype),
            shape=shape_after(ops, info.shape),
            stored=info.name,
            ops=ops,
            scale=scale,
        )


def _decoded(dtype: str) -> str:
    """Return the type of a tensor's values: FP8 was made from BF16, ggml's blocks hold floats."""
    if dtype in SOURCE_TYPES:
        return dtype
    return "BF16" if dtype in FP8_TYPES else "F32"


def _pieces(slot: Slot, sizes: Mapping[str, int]) -> Iterator[tuple[str, str, tuple[Op, ...]]]:
    """Yield (hub name, role, operations) of each atom inside a stored tensor."""
    role, parent = slot.rule.role, slot.hub.removesuffix(".weight").rsplit(".", 1)[0]
    if role in EXPERT_PIECES:
        experts = f"{parent.split('.mlp.', 1)[0]}.mlp.experts"
        width = sizes["F"]
        for e in range(slot.shape[0]):
            for projection, half in EXPERT_PIECES[role]:
                cut: tuple[Op, ...] = (Unstack(e),)
                if half is not None:
                    cut += (Rows(half * width, (half + 1) * width),)
                yield f"{experts}.{e}.{projection}.weight", "expert", cut
    elif role in GDN_PIECES:
        ratio = sizes["NV"] // sizes["NK"]
        dims = {"k": sizes["DK"], "v": ratio * sizes["DV"], "h": ratio}
        widths = tuple(dims[w] for w in GDN_PIECES[role][0])
        for projection, keep in GDN_PIECES[role][1]:
            regroup = Regroup(sizes["NK"], widths, keep)
            yield f"{parent}.{projection}.weight", projection, (regroup,)
    else:
        yield slot.hub, role, ()


# stored role: ((projection, which half of the rows), ...)
EXPERT_PIECES: dict[str, tuple[tuple[str, int | None], ...]] = {
    "experts_gate_up": (("gate_proj", 0), ("up_proj", 1)),
    "experts_down": (("down_proj", None),),
    "experts_gate": (("gate_proj", None),),
    "experts_up": (("up_proj", None),),
}
# stored role: (widths of one key head's pieces, ((projection, pieces), ...))
GDN_PIECES: dict[str, tuple[str, tuple[tuple[str, tuple[int, ...]], ...]]] = {
    "in_proj_qkvz": ("kkvv", (("in_proj_qkv", (0, 1, 2)), ("in_proj_z", (3,)))),
    "in_proj_ba": ("hh", (("in_proj_b", (0,)), ("in_proj_a", (1,)))),
}


def _tied(config: Config, form: Form) -> tuple[bool, list[str], list[Problem]]:
    """Decide tying from the tensors; the flags can only contradict."""
    flags = config.tie_flags
    said = ", ".join(f"{k} {str(v).lower()}" for k, v in flags.items()) or "no tie flag"
    if form.head:
        note = f"lm_head is present, so the head is not tied ({said})"
        return False, [note] if any(flags.values()) else [], []
    if not any(flags.values()):
        problem = f"is missing, and the head is not tied ({said})"
        remedy = "add the head, or set tie_word_embeddings if it is tied"
        return False, [], [Problem("lm_head.weight", problem, remedy)]
    notes = [] if all(flags.values()) else [f"tie flags disagree ({said}); no lm_head: tied"]
    return True, notes, []


def _quantized(atoms: Mapping[str, Atom], infos: Mapping[str, TensorInfo]) -> str | None:
    """Name the scheme of the quantised weights, by the first of them; None: there are none."""
    for atom in atoms.values():
        if atom.scale:
            grids = scale_grids(infos[atom.stored].shape)
            return next(k for k, grid in grids.items() if grid == infos[atom.scale].shape)
        if atom.role != "embed" and infos[atom.stored].dtype not in SOURCE_TYPES:
            return f"GGUF with {infos[atom.stored].dtype}"
    return None


def _kind(held: Mapping[str, TensorInfo], config: Config, form: Form) -> str:
    if form.gdn_in == "fused":
        return "next"
    named = _segments(held)[:2] == ["model", "language_model"]
    return HUB if config.nested and (form.vision or named) else TEXT


def _segments(held: Mapping[str, TensorInfo]) -> list[str]:
    """Segments of the name under which the embedding is stored: they show the namespace."""
    info = held.get("embed_tokens.weight")
    return info.name.split(".") if info else []


def _notes(held: Mapping[str, TensorInfo], config: Config, form: Form, *, mlx: bool) -> list[str]:
    notes = []
    if _segments(held).count("language_model") > 1:
        notes.append("the prefix language_model is repeated; it is collapsed")
    if any(FP32_HOLDER in info.name.split(".") for info in held.values()):
        notes.append(f"tensors stand under {FP32_HOLDER}; they are renamed")
    if mlx:
        notes.append("an MLX layout: conv1d axes and shifted norms are put back")
    if form.mtp_layers != config.mtp_layers:
        notes.append(
            f"mtp_num_hidden_layers is {config.mtp_layers}, "
            f"but the tensors hold {form.mtp_layers} MTP layers"
        )
    return notes
