"""A checkpoint's layers, run one after another over texts; one layer is in memory at a time.

    x = embed[ids];   x = layer_i(x) for each i;   hidden = norm(x);   MTP head on hidden and ids

The comparison of logits reads the residual stream after each layer. An observer sees the input of
every linear by our names: the importance matrix sums its squares, a Hessian would sum x^T x.
Embedding rows are gathered from the mapped file; on a CPU an expert is decoded when tokens reach
it, once for all of them.

The MTP head sees the embedding of the next token and the state after the final norm, so for it each
text is a token shorter.

Shape letters: T packed tokens of all texts, H hidden size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from formats.checkpoint import Checkpoint
from formats.family.config import Config
from runtime.errors import RequestError
from runtime.kernels.linear.product import linear
from runtime.kernels.norm.rms import rmsnorm
from runtime.layer_pass import LayerPass, Observer, SeeCache, grouped
from runtime.load import Loader, check, has_mtp
from runtime.reader import Change
from runtime.workers import Workers

Progress = Callable[[str], None]


class Walk:
    """Texts on their way through a checkpoint, seen by an observer if there is one."""

    def __init__(
        self,
        loader: Loader,
        texts: Sequence[Tensor],
        workers: Workers,
        observer: Observer | None = None,
    ) -> None:
        self.loader, self.config, self.texts, self.workers = loader, loader.config, texts, workers
        lengths = [len(ids) for ids in texts]
        groups = list(grouped(lengths, self.config, loader.device, loader.dtype))
        self.layer_pass = LayerPass(self.config, groups, workers, observer)

    @staticmethod
    def over(
        checkpoint: Checkpoint,
        texts: Sequence[Tensor],
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        workers: Workers | None = None,
        observer: Observer | None = None,
    ) -> Walk:
        """Return a walk of texts [T] of token ids, each of 2 at least.

        workers  None: the calling thread does all

        FormatError if the checkpoint has problems, RequestError for other texts than that or ids
        outside the vocabulary.
        """
        check(checkpoint)
        check_texts(texts, checkpoint.config)
        device = torch.device(device)
        loader = Loader(checkpoint, device, dtype, lazy_experts=device.type == "cpu")
        return Walk(loader, texts, workers or Workers(device, 1), observer)

    def watch_cache(self, see: SeeCache) -> None:
        """Show `see` the keys and values of every layer that is still to come."""
        self.layer_pass = replace(self.layer_pass, see_cache=see)

    def use_fp8_cache(self) -> None:
        """Round keys and values in every layer to come, if the checkpoint's config asks for it."""
        self.loader = replace(self.loader, fp8_cache=True)

    def use_changed(self, change: Change) -> None:
        """Read in every layer to come, and in the head, what `change` gives for a tensor."""
        self.loader = replace(self.loader, change=change)

    @torch.inference_mode()
    def residuals(self) -> Iterator[Tensor]:
        """Yield the residual stream [T, H] after each layer; only that layer's weights are read."""
        x = self.embedded()
        for i in range(len(self.config.layer_types)):
            x = self.layer(i, x)
            yield x

    @torch.inference_mode()
    def layer(self, i: int, x_TH: Tensor) -> Tensor:
        """Return the residual stream [T, H] after layer i."""
        return self.layer_pass.run(x_TH, self.loader.layer(i), f"layers.{i}.")

    @torch.inference_mode()
    def hidden(self, x_TH: Tensor) -> Tensor:
        """Return the final norm of the last residual stream [T, H]: the input of the head."""
        hidden = rmsnorm(x_TH, self.loader.tensor("norm"), self.config.eps)
        self.layer_pass.show("", [self.head], hidden)
        return hidden

    @property
    def head(self) -> str:
        """Return the name of the head's weight, which is the embedding's if they are tied."""
        return "embed_tokens" if self.loader.checkpoint.layout.tied else "lm_head"

    @torch.inference_mode()
    def mtp(self, hidden_TH: Tensor) -> Tensor:
        """Return the residual stream [T - texts, H] after the MTP head's layer.

        hidden_TH  from `hidden`
        """
        mtp, eps, passed = self.loader.mtp(), self.config.eps, self.layer_pass
        by_text = torch.split(hidden_TH, [len(ids) for ids in self.texts])
        states = rmsnorm(torch.cat([part[:-1] for part in by_text]), mtp.norm_hidden, eps)
        following = [ids[1:] for ids in self.texts]
        rest = Walk(self.loader, following, self.workers, passed.observer)
        embedding = rmsnorm(rest.embedded(), mtp.norm_embedding, eps)
        x = torch.cat([embedding, states], -1)
        passed.show("mtp.", ["fc"], x)
        return rest.layer_pass.run(linear(x, mtp.fc), mtp.layer, "mtp.layers.0.")

    @torch.inference_mode()
    def embedded(self) -> Tensor:
        """Return the embedding of the texts [T, H]: the input of the first layer."""
        embed = self.loader.open("embed_tokens")
        x = self.loader.rows(embed, torch.cat(list(self.texts)))
        embed.release(0, len(embed.data))
        return x


def observe_all(
    checkpoint: Checkpoint,
    texts: Sequence[Tensor],
    observer: Observer | None,
    *,
    workers: Workers,
    see_cache: SeeCache | None = None,
    progress: Progress = lambda _: None,
) -> None:
    """Show an observer what texts bring to every linear of a checkpoint, the MTP head's too.

    texts      token ids [T] of texts of their own, each of 2 at least; all are held, T*H float32
    observer   None: nobody looks at linears, and the MTP head is left out
    workers    entered, with the device of the pass
    see_cache  is shown the keys and values of the decoder layers

    FormatError if the checkpoint has problems, RequestError for ids outside its vocabulary.
    """
    walk = Walk.over(
        checkpoint,
        texts,
        device=workers.device,
        dtype=torch.float32,
        workers=workers,
        observer=observer,
    )
    if see_cache is not None:
        walk.watch_cache(see_cache)
    hidden = walk.hidden(deque(_reported(walk, progress), maxlen=1).pop())
    if observer is not None and has_mtp(checkpoint):
        walk.mtp(hidden)
        progress("MTP head")


def _reported(walk: Walk, progress: Progress) -> Iterator[Tensor]:
    """Yield the residual stream after each layer and report it."""
    layers = len(walk.config.layer_types)
    for i, x in enumerate(walk.residuals(), 1):
        progress(f"layer {i} of {layers}")
        yield x


def check_texts(texts: Sequence[Tensor], config: Config) -> None:
    """Raise RequestError unless these are texts of at least two ids of the vocabulary."""
    if not texts or any(ids.ndim != 1 or len(ids) < 2 for ids in texts):
        shapes = [list(ids.shape) for ids in texts]
        raise RequestError(f"token ids have shapes {shapes}, expected texts of 2 tokens at least")
    low, high = min(int(ids.min()) for ids in texts), max(int(ids.max()) for ids in texts)
    if low < 0 or high >= config.sizes["V"]:
        raise RequestError(
            f"token ids reach from {low} to {high}, expected 0 to {config.sizes['V'] - 1}"
        )
