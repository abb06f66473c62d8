"""GPTQ on the GPU: the columns of a block, walked in one launch for many matrices."""

from quant.fourbit.batched import Blocks
from runtime.kernels.gptq.pairs import pair_block
from runtime.kernels.gptq.settle import settle_block
from runtime.kernels.gptq.walk import walk_block

BLOCKS = Blocks(walk_block, settle_block, pair_block)
