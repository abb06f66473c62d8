"""Time calibrated conversions on a GPU, all included: seconds of each layer.

    python -m benchmarks.calibration [--case 35B-A3B] [--recipe nvfp4a16] [--device cuda]

Layers of random weights, with the sizes of the 35B-A3B and the 27B, and a small vocabulary: read,
run, encoded by GPTQ, written, read back and run again. The text is words of the bundled one in
random order, so that every expert gets tokens. The artifact must pass `verify` of its structure,
and with --verify of its values by bounds, or the exit code is 1. The first layer of a kind waits
for Triton, too. One JSON line for each case is appended to results/gptq.jsonl. With --profile,
where the time of the calling thread goes is printed.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import shutil
import sys
import tempfile
import time
import traceback
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import convert
from benchmarks.convert import COMMON, MOE, commit, generate
from benchmarks.lines import record

RESULTS = Path(__file__).parent / "results" / "gptq.jsonl"
TOKENIZER = Path(__file__).parent.parent / "tests" / "data" / "nano-dense"
DENSE = {
    "model_type": "qwen3_5_text", "vocab_size": 8192, "hidden_size": 5120, "num_hidden_layers": 4,
    "num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48,
    "intermediate_size": 17408, "tie_word_embeddings": False, "mtp_num_hidden_layers": 0,
}  # fmt: skip
SMALL = {
    "hidden_size": 256, "num_attention_heads": 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
}  # fmt: skip
WHOLE = {"mtp_num_hidden_layers": 0, "num_hidden_layers": 4}
FORM: dict[str, Any] = {"vision": False, "mtp_layers": 0}
CASES = {
    "35B-A3B": (COMMON | MOE | WHOLE, FORM),
    "27B": (COMMON | DENSE | WHOLE, FORM),
    "small": (COMMON | MOE | WHOLE | SMALL, FORM),
}


def main() -> int:
    """Convert the cases that were asked for; return 1 if one fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--case", choices=CASES, action="append", help="both models if not given")
    parser.add_argument("--recipe", default="nvfp4a16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--verify", action="store_true", help="values by bounds: minutes")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where lines are appended")
    parser.add_argument("--commit", help="of the tree that this runs from, if it has no .git")
    options = parser.parse_args()
    failed = False
    for case in options.case or ("35B-A3B", "27B"):
        with tempfile.TemporaryDirectory() as folder:
            try:
                line = measure(Path(folder), case, options)
            except Exception:  # noqa: BLE001 - the other cases are still measured
                traceback.print_exc()
                failed = True
                continue
        record(options.results, line)
        failed |= not line["passed"]
    return int(failed)


def measure(folder: Path, case: str, options: argparse.Namespace) -> dict[str, object]:
    """Return a line of one case."""
    import torch

    import qwen35_convert as q

    source, out, text = folder / "in", folder / "out", folder / "text.txt"
    prepare(source, text, case, options.tokens)
    settings = (
        "layout=text", "vision=drop", "quantize.method=gptq",
        f"quantize.calibrate.tokens={options.tokens}", f"quantize.calibrate.text={text}",
    )  # fmt: skip
    profile, times = cProfile.Profile(), watch()
    run = q.RunOptions(device=options.device, verify=False)
    if options.profile:
        profile.enable()
    start = time.perf_counter()
    q.convert(source, out, options.recipe, run, overrides=settings)
    whole = time.perf_counter() - start
    profile.disable()
    if options.profile:
        pstats.Stats(profile).sort_stats("cumulative").print_stats(45)
    level = "tensors" if options.verify else "structure"
    report = q.verify(out, source, level=level, by_bounds=options.verify)
    print(*report.failures[:5], sep="\n")
    seconds = [after - before for before, after in zip([start, *times], times, strict=False)]
    gpu = options.device == "cuda"
    return {
        "what": "calibrated conversion", "case": case, "recipe": options.recipe,
        "tokens": options.tokens, "convert_s": whole, "layers_s": seconds, "passed": report.passed,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if gpu else None,
        "card": torch.cuda.get_device_name() if gpu else options.device,
        "commit": options.commit or commit(), "versions": {"torch": metadata.version("torch")},
    }  # fmt: skip


def prepare(source: Path, text: Path, case: str, tokens: int) -> None:
    """Write a checkpoint of random weights with a tokenizer, and a text of so many tokens."""
    import torch

    from qwen35_convert.text.tokens import DEFAULT_TEXT

    torch.manual_seed(0)
    convert.CASES |= CASES
    generate(source, case)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, source)
    words = sorted(set(DEFAULT_TEXT.read_text().split()))
    text.write_text(" ".join(random.Random(0).choices(words, k=tokens)))


def watch() -> list[float]:
    """Return a list that gets the time at which each layer is durable."""
    from qwen35_convert.calibration import executor

    times: list[float] = []
    append = executor.append_seen

    def noted(*call: Any) -> None:
        append(*call)
        times.append(time.perf_counter())
        few, spent = len(call[1].fallback), times[-1] - times[max(0, len(times) - 2)]
        print(f"  {call[1].stage}: {spent:.1f} s, {call[1].experts}, {few} swept", flush=True)

    executor.append_seen = noted
    return times


if __name__ == "__main__":
    sys.exit(main())
