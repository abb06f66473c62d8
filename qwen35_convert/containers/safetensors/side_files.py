"""What stands beside the tensors of a folder: tokenizer and the like, config.json, the index.

Files of the source come by an allow-list (`Checkpoint.sides`), byte for byte; code never does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from formats.checkpoint import Checkpoint
from formats.quant_methods import MODELOPT
from formats.safetensors.hf_quant import HF_QUANT
from formats.safetensors.index import INDEX
from formats.side_names import CONFIG
from qwen35_convert.card.front_matter import README
from qwen35_convert.containers.safetensors.modelopt import hf_quant_config
from qwen35_convert.planning.plan import Shard
from qwen35_convert.write.receipt import dump_json


def files_beside(
    source: Checkpoint, config: Mapping[str, Any], shards: Sequence[Shard]
) -> dict[str, Callable[[], bytes]]:
    """Return what makes each file, by name."""
    files: dict[str, Callable[[], bytes]] = {
        name: partial(source.sides.__getitem__, name)
        for name in source.side_names
        if name != README  # the artifact gets a card of its own
    }
    block = config.get("quantization_config", {})
    if block.get("quant_method") == MODELOPT:
        files[HF_QUANT] = partial(dump_json, hf_quant_config(block))
    return files | {CONFIG: partial(dump_json, config), INDEX: partial(_index, shards)}


def _index(shards: Sequence[Shard]) -> bytes:
    where = {info.name: shard.name for shard in shards for info in shard.infos}
    total = sum(info.nbytes for shard in shards for info in shard.infos)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    return dump_json(index)
