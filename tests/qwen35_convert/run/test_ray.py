"""`convert --executor ray` on a real cluster of two nodes, one of which is killed midway.

The cluster is ray's own for tests: a head without cores and two nodes of one core, each with its
own processes, on this machine. Its file system is shared; where it must not be, the token that
nodes look for is made another.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quant.errors import QuantError
from qwen35_convert import api, artifact
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.errors import MissingError, OutputError, RecipeError
from qwen35_convert.options import Limit
from qwen35_convert.recipe.recipe import read_recipe
from qwen35_convert.run import ray_cluster, ray_crew
from qwen35_convert.run.ray_node import Node, Spec
from qwen35_convert.run.worker import Effort
from qwen35_convert.source import Merge
from qwen35_convert.versions import version
from qwen35_convert.write.out import partial_of
from qwen35_convert.write.sink import FolderSink
from tests.adapters import of_matrix, write_adapter
from tests.checkpoints import hub_config, make_weights, moe, write_checkpoint

ROOT = Path(__file__).parents[3]
NODES = 2
NANO_FILE = "model.safetensors-00001-of-00001.safetensors"

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.xdist_group("ray")  # one cluster for all


class Nodes:
    """The cluster and its nodes; `kill` takes one away with all its processes."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self.nodes = [self.cluster.add_node(num_cpus=1, wait=False) for _ in range(NODES)]
        self.cluster.wait_for_nodes()
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level="ERROR")

    def kill(self, node_id: str) -> None:
        node = next(node for node in self.nodes if node.node_id == node_id)
        self.nodes.remove(node)
        # a worker can outlive its raylet for seconds, and answer
        (raylet,) = node.all_processes["raylet"]
        for children in Path(f"/proc/{raylet.process.pid}/task").glob("*/children"):
            for pid in children.read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        self.cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        ray.shutdown()
        self.cluster.shutdown()


@pytest.fixture(scope="module")
def nodes():
    started = Nodes()
    yield started
    started.close()


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch):
    monkeypatch.setattr(ray_cluster, "BATCH_BYTES", 1 << 15)


def files_of(path: Path) -> dict[str, bytes]:
    """Return the files of a folder, or of a GGUF file with what lies beside it."""
    names = sorted(path.iterdir()) if path.is_dir() else sorted(path.parent.glob("m*"))
    return {name.name: name.read_bytes() for name in names}


@pytest.fixture
def one_node(nodes, monkeypatch):
    """Let only one node be seen: each that works has to load torch first."""
    living = nodes.nodes[0].node_id
    seen = [node for node in ray.nodes() if node["NodeID"] == living]
    monkeypatch.setattr(ray, "nodes", lambda: seen)
    return nodes


@pytest.mark.all
def test_the_items_of_a_killed_node_are_converted_by_the_other(tmp_path, nano, nodes, monkeypatch):
    """One of two is killed midway; the output is that of one machine, receipt included."""
    api.convert(nano, tmp_path / "one", read_recipe("fp8-block"))
    killed, said, journalled = [], [], []
    append, hand_out = ray_cluster.Journal.append, ray_crew.Crew.hand_out

    def count(journal, items) -> None:
        append(journal, items)
        journalled.append(len(items))

    def kill_midway(crew, batches) -> None:
        if batches and crew.idle and len(journalled) >= 3 and not killed:
            killed.append(crew.idle[-1].node)  # who gets the next batch
            nodes.kill(killed[0])
        hand_out(crew, batches)

    monkeypatch.setattr(ray_cluster.Journal, "append", count)
    monkeypatch.setattr(ray_crew.Crew, "hand_out", kill_midway)
    monkeypatch.setattr(artifact, "notice", said.append)
    done = api.convert(
        nano,
        tmp_path / "two",
        read_recipe("fp8-block"),
        options=api.RunOptions(executor="ray", progress=True),
    )
    assert sum(journalled) == len(done.plan.items)
    assert len(killed) == 1
    assert any(killed[0][:8] in line and "items are converted again" in line for line in said)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


@pytest.mark.all
def test_a_gguf_file_has_the_bytes_of_one_machine(tmp_path, nano, one_node):
    for folder, executor in (("one", "threads"), ("cluster", "ray")):
        (tmp_path / folder).mkdir()
        done = api.convert(
            nano, tmp_path / folder / "m.gguf", options=api.RunOptions(executor=executor)
        )
        assert done.report is not None
        assert done.report.passed
    assert files_of(tmp_path / "one" / "m.gguf") == files_of(tmp_path / "cluster" / "m.gguf")


@pytest.mark.all
def test_an_adapter_is_merged_on_the_nodes(tmp_path, nano, one_node):
    module = "model.language_model.layers.2.mlp.down_proj"
    weight = load_file(nano / NANO_FILE)[f"{module}.weight"]
    merge = Merge(write_adapter(tmp_path / "tuned", of_matrix(module, weight)), nano)
    for executor in ("threads", "ray"):
        options = api.RunOptions(executor=executor)
        done = api.convert(merge, tmp_path / executor, read_recipe("fp8-block"), options)
        assert done.report is not None
        assert done.report.passed, done.report.failures
    assert files_of(tmp_path / "threads") == files_of(tmp_path / "ray")


@pytest.mark.all
def test_an_error_in_an_item_comes_back_as_what_it_is(tmp_path, one_node):
    config = hub_config()
    weights = make_weights(config)
    weights["model.language_model.layers.2.mlp.up_proj.weight"][3, 5] = torch.nan
    source = write_checkpoint(tmp_path / "in", config, weights)
    with pytest.raises(QuantError, match=r"layers\.2\.mlp\.up_proj.*1 of 49152 weights are NaN"):
        api.convert(source, tmp_path / "out", options=api.RunOptions(executor="ray"))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def node_of(out: Path, source: Path, changes: dict) -> Node:
    """Return what a node is before its first item; OUT is reserved and marked."""
    opened = open_checkpoint(source)
    plan = api.plan(source, out=out)
    sink = FolderSink(out, plan.shards)
    sink.open()
    sink.create()
    sink.mark("token")
    sink.close()
    spec = Spec(
        source=source,
        name=opened.name,
        recipe=plan.recipe,
        out=out,
        token="token",
        digest=plan.digest(opened),
        version=version(),
        device="cpu",
        limit=None,
    )
    return Node(replace(spec, **changes), 2, "far")


def test_a_node_opens_what_it_is_told_of(tmp_path):
    assert node_of(tmp_path / "out", moe(tmp_path / "in"), {}).prepare() is None


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"token": "another"}, OutputError, "node far does not see what this machine writes"),
        ({"out": Path("nowhere/out")}, OutputError, "expected a file system that all nodes share"),
        ({"digest": "another"}, OutputError, "node far sees another source"),
        ({"source": Path("nowhere")}, OutputError, "node far: nowhere does not exist"),
        ({"version": "0.0.0"}, MissingError, "expected 0.0.0"),
        ({"limit": Limit(1000)}, MissingError, "node far: --memory-limit is 1 MB"),
    ],
)
def test_a_node_that_cannot_work_says_why(tmp_path, changes, kind, said):
    error = node_of(tmp_path / "out", moe(tmp_path / "in"), changes).prepare()
    assert isinstance(error, kind)
    assert said in str(error)
    assert type(pickle.loads(pickle.dumps(error))) is kind


@pytest.mark.all
def test_what_a_node_refuses_leaves_the_work_that_is_done(tmp_path, one_node, monkeypatch):
    mark = FolderSink.mark
    monkeypatch.setattr(FolderSink, "mark", lambda self, _: mark(self, "another"))
    with pytest.raises(OutputError, match="does not see what this machine writes") as refused:
        api.convert(moe(tmp_path / "in"), tmp_path / "out", options=api.RunOptions(executor="ray"))
    assert "run the same command again" in refused.value.left


@pytest.mark.all
def test_ctrl_c_leaves_what_the_same_command_resumes(tmp_path, nano, one_node):
    out = tmp_path / "out"
    code = (
        "import ray\nfrom qwen35_convert import cli\nfrom qwen35_convert.run import ray_cluster\n"
        f"ray.nodes = lambda: {ray.nodes()}\nray_cluster.BATCH_BYTES = 1\ncli.main()"
    )
    command = [
        sys.executable,
        "-c",
        code,
        "convert",
        str(nano),
        "-o",
        str(out),
        "--executor",
        "ray",
    ]
    environment = os.environ | {"RAY_ADDRESS": one_node.cluster.address, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    journal = partial_of(out) / "journal"
    deadline = time.monotonic() + 240
    while not (journal.exists() and journal.read_text().count("\n") > 3):
        assert time.monotonic() < deadline, process.communicate()
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert said.count("qwen35: interrupted") == 1
    assert "Traceback" not in said
    assert not out.exists()
    done = api.convert(nano, out)  # by whatever executor
    api.convert(nano, tmp_path / "one")
    assert done.report is not None
    assert files_of(out) == files_of(tmp_path / "one")


class Answers:
    """Ray as one call sees it: it answers with an error."""

    def __init__(self, error: Exception) -> None:
        self.error, self.killed = error, []

    def wait(self, calls, timeout):
        return calls, []

    def get(self, _):
        raise self.error

    def kill(self, actor) -> None:
        self.killed.append(actor)


def crew_of(error: Exception) -> ray_crew.Crew:
    effort = Effort(1, "cpu", lambda _: None)
    crew = ray_crew.Crew(Answers(error), None, None, effort, "finished work is kept")
    crew.calls["call"] = ray_crew.Member("id", "far", "actor", ray_crew.Batch([1, 2]))
    return crew


@pytest.mark.parametrize(
    "error",
    [
        ray.exceptions.ActorUnschedulableError("gone"),
        ray.exceptions.ActorDiedError(),
        ray.exceptions.RayError(),
    ],
)
def test_a_node_lost_in_whatever_way_gives_its_items_back(error):
    crew, batches = crew_of(error), deque()
    assert list(crew.collect(batches)) == []
    assert [batch.items for batch in batches] == [[1, 2]]
    assert crew.ray.killed == ["actor"]
    assert not crew.busy()


def test_items_that_take_three_nodes_with_them_are_given_up():
    crew = crew_of(ray.exceptions.ActorDiedError())
    crew.calls["call"].batch.losses = ray_crew.MAX_LOSSES - 1
    with pytest.raises(
        OutputError, match="3 nodes were lost while converting the same items"
    ) as given_up:
        list(crew.collect(deque()))
    assert given_up.value.left == "finished work is kept"


def test_without_any_node_it_ends(monkeypatch):
    crew = crew_of(ValueError())
    crew.calls.clear()
    crew.ray.nodes = list
    monkeypatch.setattr(ray_crew, "PATIENCE_SECONDS", -1.0)
    with pytest.raises(OutputError, match="no node of the Ray cluster is left"):
        crew.enlist()


def test_without_ray_the_executor_says_what_to_install(tmp_path, nano, monkeypatch):
    monkeypatch.setattr(ray_cluster, "find_spec", lambda _: None)
    with pytest.raises(MissingError, match=r"not installed, expected the extra \[ray\]"):
        api.convert(nano, tmp_path / "out", options=api.RunOptions(executor="ray"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RecipeError, match="expected threads or ray"):
        api.convert(nano, tmp_path / "out", options=api.RunOptions(executor="spark"))


def test_an_address_where_nobody_listens_is_refused_at_once(tmp_path, nano, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(MissingError, match=r"no cluster answers at 127\.0\.0\.1:1"):
        api.convert(nano, tmp_path / "out", options=api.RunOptions(executor="ray"))
    assert list(tmp_path.iterdir()) == []


def test_ray_is_imported_by_its_executor_only():
    modules = "qwen35_convert.run.executor, qwen35_convert.cli"
    code = f"import sys, {modules}\nassert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
