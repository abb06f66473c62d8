"""What stands beside the tensors of a folder: tokenizer and the like, config.json, the index.

Files of the source come by an allow-list (`Checkpoint.side_names`), byte for byte; code never does.
"""

from __future__ import annotations

from typing import Any

from formats.checkpoint import INDEX, Checkpoint
from qwen35_convert.planning.plan import Plan
from qwen35_convert.write.receipt import dump_json
from qwen35_convert.write.sink import FolderSink


def add_side_files(job: Plan, source: Checkpoint, sink: FolderSink) -> None:
    """Write all of them."""
    for name in source.side_names:
        sink.add_file(name, source.side(name) or b"")
    sink.add_file("config.json", dump_json(job.config))
    sink.add_file(INDEX, dump_json(_index(job)))


def _index(job: Plan) -> dict[str, Any]:
    where = {info.name: shard.name for shard in job.shards for info in shard.infos}
    total = sum(info.nbytes for shard in job.shards for info in shard.infos)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
