"""What a step must move and compute, counted from an artifact's own tensors.

    decode    each weight once, as it is stored; of experts those that a batch is expected to
              choose; states read and written, keys and values read (`runtime.floors`)
    prefill   2 operations for each weight and token; those of FP8 weights at FP8's rate

The embedding is read by rows, which is negligible; a tied embedding counts as the head. MTP and
vision take no part in a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from formats.checkpoint import Checkpoint
from formats.family.layout import Atom
from formats.family.roles import ROLES
from formats.tensor import TensorInfo
from quant.fp8.scales import holds_codes
from runtime.floors import Card, mixing_flops, sequence_bytes

NO_STEP = ("mtp", "visual")


@dataclass(frozen=True, slots=True)
class Work:
    """The weights of a step: bytes as stored and operations a token, experts counted apart.

    `expert_*` are sums over all experts of all layers; `share` of them is what one token uses.
    """

    checkpoint: Checkpoint
    bytes: float
    expert_bytes: float
    fp8_flops: float
    other_flops: float
    head_flops: float
    share: float

    def step_bytes(self, tokens: int, *, sequences: int, context: int) -> float:
        """Return the bytes that a step of so many tokens moves."""
        used = 1 - (1 - self.share) ** tokens
        state = sequences * sequence_bytes(self.checkpoint.config, context)
        return self.bytes + used * self.expert_bytes + state

    def step_flops(self, tokens: int, *, sequences: int, context: int) -> float:
        """Return the operations of a step of so many tokens; the head gives each sequence one."""
        mixing = mixing_flops(self.checkpoint.config, context)
        each = self.fp8_flops + self.other_flops + mixing
        return tokens * each + sequences * self.head_flops

    def decode_floor_ms(self, card: Card, batch: int, context: int) -> float:
        """Return the least milliseconds of a decode step."""
        moved = self.step_bytes(batch, sequences=batch, context=context)
        return moved / card.bandwidth * 1e3

    def prefill_floor_ms(self, card: Card, tokens: int) -> float:
        """Return the least milliseconds of a prompt; of a short one, those of reading weights."""
        mixing = mixing_flops(self.checkpoint.config, tokens)
        each = self.fp8_flops / card.fp8_rate + (self.other_flops + mixing) / card.bf16_rate
        read = self.step_bytes(tokens, sequences=0, context=0)
        return max(tokens * each, read / card.bandwidth) * 1e3


def count_work(checkpoint: Checkpoint) -> Work:
    """Count the weights of one step of the text model."""
    sizes, infos = checkpoint.config.sizes, checkpoint.infos()
    share = sizes["TOPK"] / sizes["E"] if checkpoint.config.moe else 0.0
    plain = experts = fp8 = other = head = 0.0
    for atom in checkpoint.layout.atoms.values():
        if not _takes_part(atom, tied=checkpoint.layout.tied):
            continue
        nbytes, flops = _stored_bytes(atom, infos[atom.stored], checkpoint), _flops(atom)
        if ROLES[atom.role].vocabulary:
            head += 2.0 * atom.shape[0] * atom.shape[1]
        if atom.role == "expert":
            experts, flops = experts + nbytes, flops * share
        else:
            plain += nbytes
        coded = holds_codes(infos[atom.stored])
        fp8, other = (fp8 + flops, other) if coded else (fp8, other + flops)
    return Work(checkpoint, plain, experts, fp8, other, head, share)


def _takes_part(atom: Atom, *, tied: bool) -> bool:
    return atom.name.split(".", 1)[0] not in NO_STEP and (not ROLES[atom.role].gathered or tied)


def _flops(atom: Atom) -> float:
    """Return the operations a token; the head is applied to a prompt's last token only."""
    return 2.0 * atom.shape[0] * atom.shape[1] if ROLES[atom.role].product else 0.0


def _stored_bytes(atom: Atom, info: TensorInfo, checkpoint: Checkpoint) -> float:
    """Return the atom's part of the stored tensor, with its part of the scale."""
    whole = sum(checkpoint.infos()[part].nbytes for part in atom.parts)
    part = TensorInfo(atom.name, "U8", atom.shape).numel / info.numel
    return whole * part
