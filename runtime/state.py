"""What a sequence leaves behind: delta-rule states, convolution histories, keys and values.

    recurrent  [states, gdn layers, V, k, v]     float32, or bfloat16 by option
    conv       [states, gdn layers, C, K-1]      model dtype: inputs of the convolution
    keys       [kv layers, slots, max_len, nkv, d]   model dtype; values alike

All are allocated once; a layer's pool is a view with slots first. Kernels find a sequence by its
slot, from a table on the device. Negative slots are padding: they read zeros and write nothing.
A slot's state and history are zeroed when it is handed out; of its keys and values only those are
ever read that the sequence itself has written.

Trap: nothing here, and no workspace, may be sized by the feed-forward. A mixture of experts can
have an inner size below the width of its convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

import torch
from torch import Tensor

from formats.family.config import Config

Pools = tuple[Tensor, Tensor]


def conv_channels(config: Config) -> int:
    """Return how many channels the convolution has: those of q, k and v."""
    sizes = config.sizes
    return 2 * sizes["NK"] * sizes["DK"] + sizes["NV"] * sizes["DV"]


@dataclass(frozen=True)
class Room:
    """How many sequences of how many tokens there is room for.

    spares      states without keys and values: where the states after drafted tokens are tried out
    mtp_layers  attention layers of the MTP head, whose keys and values come last
    """

    slots: int
    max_len: int
    spares: int = 0
    mtp_layers: int = 0


@dataclass
class State:
    """The pools of one model. Slot n has state n; spare states come after those of the slots."""

    config: Config
    recurrent: Tensor
    conv: Tensor
    keys: Tensor
    values: Tensor
    free_slots: list[int] = field(default_factory=list)

    @staticmethod
    def allocate(
        config: Config,
        room: Room,
        *,
        device: torch.device,
        dtype: torch.dtype,
        recurrent_dtype: torch.dtype = torch.float32,
    ) -> State:
        """Return empty pools."""
        sizes, kinds = config.sizes, config.layer_types
        gdn = kinds.count("linear_attention")
        lead = (room.slots + room.spares, gdn)
        kv_layers = len(kinds) - gdn + room.mtp_layers
        cells = (kv_layers, room.slots, room.max_len, sizes["NKV"], sizes["HD"])
        state_shape = (*lead, sizes["NV"], sizes["DK"], sizes["DV"])
        conv_shape = (*lead, conv_channels(config), sizes["K"] - 1)
        return State(
            config=config,
            recurrent=torch.zeros(state_shape, dtype=recurrent_dtype, device=device),
            conv=torch.zeros(conv_shape, dtype=dtype, device=device),
            keys=torch.zeros(cells, dtype=dtype, device=device),
            values=torch.zeros(cells, dtype=dtype, device=device),
            free_slots=list(range(room.slots)),
        )

    def pools(self) -> list[Pools]:
        """Return the two pools of each decoder layer: (conv, recurrent) or (keys, values)."""
        gdn, kv = iter(range(self.conv.shape[1])), iter(range(self.keys.shape[0]))
        return [
            self._gdn_pools(next(gdn)) if kind == "linear_attention" else self._kv_pools(next(kv))
            for kind in self.config.layer_types
        ]

    def mtp_pools(self) -> Pools:
        """Return the pools of the MTP layer, which come last."""
        return self._kv_pools(self.keys.shape[0] - 1)

    def _gdn_pools(self, layer: int) -> Pools:
        return self.conv[:, layer], self.recurrent[:, layer]

    def _kv_pools(self, layer: int) -> Pools:
        return self.keys[layer], self.values[layer]

    def take_slot(self) -> int:
        """Return a free slot with an empty state; the lowest, so that runs repeat exactly."""
        assert self.free_slots, "ask for a slot only while one is free"
        slot = min(self.free_slots)
        self.free_slots.remove(slot)
        self.recurrent[slot].zero_()
        self.conv[slot].zero_()
        return slot

    def give_slot(self, slot: int) -> None:
        """Take a slot back."""
        assert slot not in self.free_slots, f"slot {slot} was given back twice"
        self.free_slots.append(slot)


def send(numbers: Sequence[float], to: Tensor) -> None:
    """Copy numbers to a tensor; neither the host waits for it, nor what it has launched before."""
    host = torch.tensor(numbers, dtype=to.dtype)
    to.copy_(host.pin_memory() if to.is_cuda else host, non_blocking=True)


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one sequence: their ids, the position of the first, where its state is.

    state  the same as `slot`, unless the sequence's state has moved to a spare
    """

    ids: Sequence[int]
    start: int
    slot: int
    state: int


PADDING = Span([0], 0, -1, -1)


@dataclass(frozen=True)
class Batch:
    """Packed tokens [T] of many sequences: first rows to decode, then longer prefills.

    each            how many decode rows a sequence has: its next tokens, one after another
    packed          all the others one after another; they are views on it
    ids, positions  [T]; position is the token's place in its sequence
    token_slots     [T] the slot of each token
    slots, states   [D+N] for each of D decode rows, then each of N prefilled sequences; a row
                    leaves the state after its token in its own
    sources         [D/each] the state that a sequence's first row continues: its own, if it has
                    but one, or one that is none of its rows'
    cu_seqlens      [N+1] bounds of the prefills, from 0, counted after the decode rows
    starts          [N] position of the first token of each prefill
    lengths         [D] tokens of each decode row's sequence, its own included
    """

    each: int
    packed: Tensor
    ids: Tensor
    positions: Tensor
    token_slots: Tensor
    slots: Tensor
    states: Tensor
    sources: Tensor
    cu_seqlens: Tensor
    starts: Tensor
    lengths: Tensor

    @staticmethod
    def pack(
        decodes: Sequence[Span], prefills: Sequence[Span], device: torch.device, *, each: int = 1
    ) -> Batch:
        """Return the batch; everything reaches the device in one copy.

        decodes  `each` rows of a sequence, then those of the next; several continue their slot's
        """
        parts = _parts(decodes, prefills, each)
        packed = torch.empty(sum(map(len, parts)), dtype=torch.int64, device=device)
        send(list(chain(*parts)), packed)
        return Batch(each, packed, *torch.split(packed, [len(part) for part in parts]))

    def fill(self, decodes: Sequence[Span]) -> None:
        """Put other decode rows, as many, in the place of those that are there."""
        send(list(chain(*_parts(decodes, [], self.each))), self.packed)

    @property
    def num_decodes(self) -> int:
        """Number of decode rows."""
        return self.lengths.shape[0]

    @property
    def num_prefills(self) -> int:
        """Number of prefilled sequences."""
        return self.starts.shape[0]


def _parts(decodes: Sequence[Span], prefills: Sequence[Span], each: int) -> list[list[int]]:
    """Return the fields of a batch after `packed`."""
    spans = [*decodes, *prefills]
    return [
        [token for span in spans for token in span.ids],
        [span.start + i for span in spans for i in range(len(span.ids))],
        [span.slot for span in spans for _ in span.ids],
        [span.slot for span in spans],
        [span.state for span in spans],
        [span.state if each == 1 else span.slot for span in decodes[::each]],
        [0, *accumulate(len(span.ids) for span in prefills)],
        [span.start for span in prefills],
        [span.start + 1 for span in decodes],
    ]
