"""What names and headers show of a checkpoint as a whole: its form, its kind, tying, notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from formats.family.config import Config
from formats.family.names import HUB, TEXT, WRAPPERS, holders, unwrap
from formats.family.rules import template
from formats.family.slots import Form
from formats.stored import MAX_NAMED, Problem
from formats.tensor import TensorInfo


def form_of(names: Sequence[str], config: Config) -> Form:
    """Return the choices within the family that names of the table show."""
    keys = {template(name) for name in names}
    rules = {key for key, _ in keys}
    heads = {name.split(".", 1)[0] for name in names}
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


def tied_by(config: Config, form: Form) -> tuple[bool, list[str], list[Problem]]:
    """Decide tying from the tensors; the flags can only contradict."""
    flags = config.tie_flags
    stated = ", ".join(f"{k} {str(v).lower()}" for k, v in flags.items()) or "no tie flag"
    if form.head:
        note = f"lm_head is present, so the head is not tied ({stated})"
        return False, [note] if any(flags.values()) else [], []
    if config.headless:
        name = config.raw["architectures"][0]
        return True, [f"{name} has no head to predict tokens: its hidden states are the result"], []
    if not any(flags.values()):
        problem = f"is missing, and the head is not tied ({stated})"
        remedy = "add the head, or set tie_word_embeddings if it is tied"
        return False, [], [Problem("lm_head.weight", problem, remedy)]
    notes = [] if all(flags.values()) else [f"tie flags disagree ({stated}); no lm_head: tied"]
    return True, notes, []


def kind_of(held: Mapping[str, TensorInfo], config: Config, form: Form) -> str:
    """Return which namespace and class fit: hub, text, or next for Qwen3-Next."""
    if form.gdn_in == "fused":
        return "next"
    named = _segments(held)[:2] == [*WRAPPERS]
    return HUB if config.nested and (form.vision or named) else TEXT


def _segments(held: Mapping[str, TensorInfo]) -> list[str]:
    """Segments of the name under which the embedding is stored: they show the namespace."""
    info = held.get("embed_tokens.weight")
    return unwrap(info.name) if info else []


def notes_of(held: Mapping[str, TensorInfo], config: Config, form: Form, *, mlx: bool) -> list[str]:
    """Return what is put right while reading, and what the config says otherwise."""
    notes = []
    if _segments(held).count("language_model") > 1:
        notes.append("the prefix language_model is repeated; it is collapsed")
    wrappers = {
        segment: who for info in held.values() for segment, who in holders(info.name).items()
    }
    notes += [f"tensors are under {one} ({who}); they are renamed" for one, who in wrappers.items()]
    if mlx:
        notes.append("an MLX layout: conv1d axes and shifted norms are put back")
    if form.mtp_layers != config.mtp_layers:
        notes.append(
            f"mtp_num_hidden_layers is {config.mtp_layers}, "
            f"but the tensors hold {form.mtp_layers} MTP layers"
        )
    return notes


def unused_notes(buffers: Sequence[str], twins: Mapping[str, str]) -> Iterator[str]:
    """Yield what is said of tensors that nobody reads."""
    if buffers:
        some = ", ".join(buffers[:MAX_NAMED]) + (" ..." if buffers[MAX_NAMED:] else "")
        yield f"{len(buffers)} buffers that every engine computes itself are not used: {some}"
    for twin, original in twins.items():
        yield f"{twin} is not written: MTP shares {original}, of which it has to be a copy"
