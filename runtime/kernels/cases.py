"""What a choice of kernels depends on: a call described in plain numbers, one type per operation.

`gpu` is whether Triton kernels run, compiled or in the interpreter: `launch.use_triton`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

FLOAT, FP8_BLOCK, FP8_CHANNEL = "float", "FP8, block", "FP8, channel"  # how a weight is stored
NVFP4, INT4 = "NVFP4", "INT4"  # of four bits, packed
SEVERAL = "several"
GROUP = 128  # columns of FP8 that share a scale, in blocks of a weight and in activations
PIECE = 1024  # numbers of a row that are normed at once


class Rows(NamedTuple):
    """Rows [rows, k] of the residual stream before a layer.

    form  of its large weights; SEVERAL where they differ, or where there are experts
    """

    gpu: bool
    rows: int
    k: int
    form: str


class Gated(NamedTuple):
    """x [rows, k] times gate and up, which are stored as one [n, k]: fields as in `Product`.

    gluon  the GPU runs kernels in Gluon
    """

    gpu: bool
    rows: int
    k: int
    dtype: torch.dtype
    form: str
    n: int
    gluon: bool
    lined: bool = False


class Added(NamedTuple):
    """One row, or a few, times a stored weight, added to the residual stream.

    Fields as in `NormedRow`.
    """

    gpu: bool
    form: str
    k: int
    nbytes: int


class Product(NamedTuple):
    """x [rows, k] times a stored weight.

    dtype    of x
    form     FLOAT, FP8_BLOCK, FP8_CHANNEL, NVFP4 or INT4
    dynamic  the weight is FP8, and many rows of x are quantised too
    lined    it is NVFP4, and kernels in Gluon run that take x lined up
    """

    gpu: bool
    rows: int
    k: int
    dtype: torch.dtype
    form: str
    dynamic: bool
    lined: bool = False


class Products(NamedTuple):
    """x [rows, k] times two stored weights: fields of the first one as in `Product`.

    card    the GPU's compute capability, (0, 0) without one
    coded   there are codes of x
    joined  the weights are floats, the second one behind the first in memory
    """

    gpu: bool
    rows: int
    k: int
    dtype: torch.dtype
    form: str
    card: tuple[int, int]
    coded: bool
    joined: bool


class Inputs(NamedTuple):
    """x [rows, k] before its product with an FP8 weight: fields as in `Product`."""

    gpu: bool
    rows: int
    form: str
    dynamic: bool
    k: int


class CodesProduct(NamedTuple):
    """Codes of x [rows, k] times an FP8 weight [n, k].

    card   the GPU's compute capability, (0, 0) without one
    dtype  of the product
    scale  dtype of the weight's scales
    gluon  the GPU runs kernels in Gluon
    """

    card: tuple[int, int]
    rows: int
    dtype: torch.dtype
    form: str
    scale: torch.dtype
    n: int
    k: int
    gluon: bool


class NormedRow(NamedTuple):
    """A row of k columns, or a few, a norm, and the weight after it, nbytes without its scales."""

    gpu: bool
    form: str
    k: int
    nbytes: int


class AddedRows(NamedTuple):
    """Rows of k numbers that are added to others and normed.

    parts  they are still to be summed from their parts
    lined  their norm is lined up for a four-bit product
    """

    k: int
    parts: bool
    lined: bool


class Router(NamedTuple):
    """Logits of the experts for each row."""

    gpu: bool
    rows: int
    experts: int
    hidden: int


class ChosenExperts(NamedTuple):
    """The chosen experts of each row: gate_up [2 * inner, hidden], down [hidden, inner].

    gluon  the GPU runs kernels in Gluon
    """

    gpu: bool
    rows: int
    form: str
    dynamic: bool
    hidden: int
    inner: int
    gluon: bool


class OneToken(NamedTuple):
    """The sparse feed-forward of one row: gate_up [2 * inner, hidden], down [hidden, inner].

    absorbed  the shared expert is the last of the stack
    top       how many experts are chosen
    """

    gpu: bool
    absorbed: bool
    form: str
    hidden: int
    inner: int
    top: int


class Step(NamedTuple):
    """The delta rule for the next tokens of each sequence.

    states  rows times value heads
    rows    of all sequences
    each    tokens of a sequence
    group   value heads of a key head
    head    size of a value head
    k       columns of the product after it
    form    of its weight; SEVERAL where others take the output
    """

    gpu: bool
    states: int
    rows: int
    each: int
    group: int
    head: int
    k: int
    form: str


class RuleOutput(NamedTuple):
    """The delta rule's output.

    decodes     rows of decoding are in the batch
    head        size of a value head
    takes_codes the product that follows takes codes in groups of 128
    """

    decodes: bool
    head: int
    takes_codes: bool


class Heads(NamedTuple):
    """Attention of a batch.

    rows     of decoding
    each     how many of them a slot has
    prompts  parts of prompts are in the batch
    """

    rows: int
    each: int
    kv_heads: int
    prompts: bool


class Draw(NamedTuple):
    """Tokens drawn from logits."""

    gpu: bool
    dtype: torch.dtype


class Prompt(NamedTuple):
    """Attention of prompts.

    compiled  not in the interpreter
    gluon     the GPU runs kernels in Gluon
    head      size of a head
    group     query heads of a key head
    each      tokens of a sequence, on average
    """

    gpu: bool
    compiled: bool
    dtype: torch.dtype
    gluon: bool
    head: int
    group: int
    each: int
