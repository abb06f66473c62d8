"""`bench`: what is counted, what is timed, what is refused."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from qwen35_convert import api, measuring
from qwen35_convert.benchmarking.bench import Bench
from qwen35_convert.benchmarking.peers import keywords, run_fla, run_vllm
from qwen35_convert.benchmarking.point import Point
from qwen35_convert.benchmarking.roofline import draw_roofline
from qwen35_convert.benchmarking.sweep import Sweep
from qwen35_convert.benchmarking.work import count_work
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.errors import MissingError, RecipeError
from runtime.floors import Card, mixing_flops, sequence_bytes
from tests.checkpoints import dense, moe
from tests.qwen35_convert.command import called

ROOT = Path(__file__).parents[3]
SMALL = Sweep(prefill=(20,), batch=(1, 3), context=24, device="cpu")


@pytest.fixture(scope="module")
def nano():
    return ROOT / "tests" / "data" / "nano-dense"


def step_tensors(checkpoint):
    """What a step reads, by hand: the trunk's tensors, the embedding only where it is the head."""
    infos = checkpoint.infos()
    names = {name for name in infos if not name.startswith(("mtp.", "model.visual."))}
    if not checkpoint.layout.tied:
        names -= {"model.language_model.embed_tokens.weight"}
    return {name: infos[name] for name in names}


def test_a_decode_step_reads_every_weight_of_the_trunk_once(nano, tmp_path):
    for folder in (nano, dense(tmp_path / "in")):
        checkpoint = open_checkpoint(folder)
        work = count_work(checkpoint)
        wanted = sum(info.nbytes for info in step_tensors(checkpoint).values())
        assert work.bytes == pytest.approx(wanted, rel=1e-12)
        moved = work.step_bytes(2, sequences=2, context=50)
        assert moved == pytest.approx(wanted + 2 * sequence_bytes(checkpoint.config, 50))


def test_of_experts_a_token_reads_those_it_chooses_and_many_tokens_read_all(tmp_path):
    checkpoint = open_checkpoint(moe(tmp_path / "in"))
    work, infos = count_work(checkpoint), step_tensors(checkpoint)
    experts = sum(info.nbytes for name, info in infos.items() if ".mlp.experts." in name)
    rest = sum(info.nbytes for name, info in infos.items() if ".mlp.experts." not in name)
    state = sequence_bytes(checkpoint.config, 9)
    # two of four experts
    assert work.step_bytes(1, sequences=1, context=9) == pytest.approx(rest + experts / 2 + state)
    assert work.step_bytes(64, sequences=0, context=0) == pytest.approx(rest + experts)


def test_an_fp8_artifact_moves_half_and_computes_at_fp8_s_rate(tmp_path):
    source = dense(tmp_path / "in")
    api.convert(source, tmp_path / "out", options=api.RunOptions(verify=False))
    plain = count_work(open_checkpoint(source))
    fp8 = count_work(open_checkpoint(tmp_path / "out"))
    assert 0.4 < fp8.bytes / plain.bytes < 0.9
    assert plain.fp8_flops == 0 < fp8.fp8_flops
    assert fp8.fp8_flops + fp8.other_flops == plain.other_flops
    assert fp8.step_flops(7, sequences=1, context=7) == plain.step_flops(7, sequences=1, context=7)


def test_a_floor_is_bytes_over_bandwidth_or_operations_over_rate(tmp_path):
    checkpoint = open_checkpoint(dense(tmp_path / "in"))
    work = count_work(checkpoint)
    slow = Card("slow", bandwidth=1e6, bf16_rate=1e18)
    moved = work.step_bytes(4, sequences=4, context=100)
    assert work.decode_floor_ms(slow, 4, 100) == pytest.approx(moved / 1e6 * 1e3)
    busy = Card("busy", bandwidth=1e18, bf16_rate=1e6)
    each = work.other_flops + mixing_flops(checkpoint.config, 100)
    assert work.prefill_floor_ms(busy, 100) == pytest.approx(100 * each / 1e6 * 1e3)


def test_every_step_of_the_sweep_is_timed(tmp_path):
    found = measuring.bench(dense(tmp_path / "in"), SMALL)
    steps = [(p.what, p.batch, p.tokens) for p in found.points]
    assert steps == [("decode", 1, 24), ("decode", 3, 24), ("prefill", 1, 20)]
    for point in found.points:
        count = point.batch if point.what == "decode" else point.tokens
        assert point.tokens_per_s == pytest.approx(count / point.ms * 1e3)
        assert point.floor_ms is None, "no floor is known for a CPU"
        assert point.bytes_moved > 0
        assert point.flops > 0
    assert json.loads(json.dumps(found.as_dict()))["versions"]["torch"]


def test_a_sweep_that_cannot_be_is_refused():
    for wrong in ({"prefill": (0,)}, {"batch": (-1,)}, {"context": 1 << 40}):
        with pytest.raises(RecipeError, match="expected 1 to"):
            Sweep(**wrong)
    with pytest.raises(RecipeError, match="device is 'tpu'"):
        measuring.bench(ROOT / "tests" / "data" / "nano-dense", Sweep(device="tpu"))


def test_a_peer_that_is_unknown_or_missing_is_said(nano, monkeypatch):
    with pytest.raises(RecipeError, match="expected transformers"):
        measuring.bench(nano, Sweep((), (1,), 8, "cpu", peer="other"))
    monkeypatch.setattr("qwen35_convert.benchmarking.peers.find_spec", lambda _: None)
    with pytest.raises(MissingError, match="not installed"):
        measuring.bench(nano, Sweep((), (1,), 8, "cpu", peer="transformers"))


VLLM = """
import time
from types import SimpleNamespace

clock = [0.0]
time.perf_counter = lambda: clock[0]  # what a step takes does not depend on this machine

class SamplingParams:
    def __init__(self, *, temperature, max_tokens, ignore_eos, detokenize):
        assert (temperature, ignore_eos, detokenize) == (0.0, True, False)
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, *, model, max_model_len, max_num_seqs, enable_prefix_caching, **others):
        assert not enable_prefix_caching
        if others.get("kv_cache_dtype") == "fp8":
            raise ValueError("told of its cache")
        if max_num_seqs > 8:
            raise MemoryError("no room for so many")
        self.longest, self.llm_engine, self.waiting, self.running = max_model_len, self, [], {}

    def add_request(self, name, prompt, wanted):
        count = len(prompt["prompt_token_ids"])
        assert count + wanted.max_tokens <= self.longest
        self.waiting.append((name, count, wanted.max_tokens))

    def step(self):
        # one prompt a step; those that are read go on meanwhile, a millisecond for each
        for made in self.running.values():
            made[0].append(7)
        clock[0] += 0.001 * len(self.running)
        if self.waiting:
            name, count, most = self.waiting.pop(0)
            self.running[name] = [7], most
            clock[0] += 0.002 * count
        told = [
            SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=list(tokens))])
            for name, (tokens, _) in self.running.items()
        ]
        self.running = {n: made for n, made in self.running.items() if len(made[0]) < made[1]}
        return told

    def abort_request(self, names):
        self.running = {}

    def has_unfinished_requests(self):
        return bool(self.waiting or self.running)
"""


@pytest.mark.all
def test_vllm_runs_beside_and_a_step_is_what_a_token_adds(nano, tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text(VLLM)  # the engine is no package that a CPU can have
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    checkpoint = open_checkpoint(nano)
    point = Point("decode", 2, 20, 1.0, None, 1.0, 1.0, 1.0, None, None, None, "H100")
    points = [point, replace(point, what="prefill", batch=1, tokens=50)]
    decode, prefill = run_vllm(checkpoint, points, Sweep(lock=tmp_path / "lock"))
    assert decode.peer_ms == pytest.approx(2.0)  # a millisecond for each of two sequences
    assert prefill.peer_ms == pytest.approx(100.0)
    with pytest.raises(MissingError, match="no room for so many"):
        list(run_vllm(checkpoint, [replace(point, batch=9)], Sweep()))


@pytest.mark.all
def test_an_engine_that_never_ends_is_ended(nano, tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    monkeypatch.setattr("qwen35_convert.benchmarking.peers.PATIENCE", 8)
    point = Point("decode", 1, 20, 1.0, None, 1.0, 1.0, 1.0, None, None, None, "H100")
    with pytest.raises(MissingError, match="peer vllm failed"):
        list(run_vllm(open_checkpoint(nano), [point], Sweep()))


def test_vllm_is_given_what_its_serving_line_says(nano, tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    point = Point("decode", 1, 20, 1.0, None, 1.0, 1.0, 1.0, None, None, None, "H100")
    fp8 = ["quantize.kv_cache=fp8", "quantize.calibrate.tokens=512"]
    api.convert(nano, tmp_path / "kv8", "fp8-block", overrides=fp8)
    with pytest.raises(MissingError, match="told of its cache"):
        list(run_vllm(open_checkpoint(tmp_path / "kv8"), [point], Sweep()))
    written = "--mode align --depth 2 --quiet --config '{\"a\": 1}'"
    options = {"mode": "align", "depth": 2, "quiet": True, "config": {"a": 1}}
    assert keywords(shlex.split(written)) == options


def test_what_vllm_does_not_load_is_no_race(nano, tmp_path):
    changes = {"architectures": ["Qwen3_5ForCausalLM"]}
    shutil.copytree(nano, tmp_path / "named")
    config = tmp_path / "named" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(RecipeError, match="names another class"):
        list(run_vllm(open_checkpoint(tmp_path / "named"), [], Sweep()))


def test_peers_that_need_a_gpu_are_refused_on_a_cpu(nano):
    for run in (run_vllm, run_fla):
        with pytest.raises(RecipeError, match="cannot run on cpu, expected cuda"):
            list(run(open_checkpoint(nano), [], Sweep(device="cpu")))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_transformers_runs_the_same_steps_beside(nano):
    found = measuring.bench(nano, Sweep((16,), (2,), 12, "cpu", peer="transformers"))
    assert [p.peer_ms is not None and p.peer_ms > 0 for p in found.points] == [True, True]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_package_that_transformers_lacks_for_these_weights_is_named(nano, monkeypatch):
    def lacking(*_):
        raise ImportError("`kernels` is not installed")

    monkeypatch.setattr("qwen35_convert.benchmarking.peers._transformers_ms", lacking)
    with pytest.raises(MissingError, match=r"cannot run .*`kernels` is not installed"):
        measuring.bench(nano, Sweep((16,), (), 12, "cpu", peer="transformers"))


def test_the_roofline_is_drawn(tmp_path):
    point = Point("decode", 1, 4096, 10.0, None, 100.0, 27e9, 5e10, 8.2, 0.82, None, "NVIDIA H100")
    bench = Bench("m", "NVIDIA H100 80GB HBM3", [point], None)
    draw_roofline(bench, tmp_path / "roof.png")
    assert (tmp_path / "roof.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_without_a_gpu_says_so_and_exits_5(nano, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = called("bench", nano)
    assert done.returncode == 5
    assert "--device cpu" in done.stderr
    assert called("bench", nano, "--batch", "one").returncode == 2
