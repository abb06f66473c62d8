"""A checkpoint read by ranges: the bytes of a copy, in constant memory, every one proven."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event

import pytest

from qwen35_convert import api, source
from qwen35_convert import options as run_options
from qwen35_convert.errors import FetchError
from qwen35_convert.hub import stream
from qwen35_convert.hub.fetch import fetch
from qwen35_convert.inspection.source import inspect
from qwen35_convert.recipe.recipe import read_recipe
from qwen35_convert.run import executor
from qwen35_convert.write.out import partial_of
from tests.checkpoints import hub_config, make_weights, write_checkpoint
from tests.qwen35_convert.hub.hub_server import Fault, Hub, only_hub
from tests.variants import TOOL, embedder, write

REPO = "maker/tiny-qwen"
TOKEN = "hf_" + "s3cr3t" * 5
BLOCK = 1 << 17


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(source, "open_stream", partial(stream.open_stream, block=BLOCK))
    with only_hub(tmp_path, monkeypatch) as hub:
        yield hub


@pytest.fixture
def publish(hub: Hub, tmp_path: Path) -> Callable[..., dict[str, bytes]]:
    """Put a model on the hub; return its files."""

    def publish(shards: int = 2, **options: object) -> dict[str, bytes]:
        config = hub_config(**options)
        folder = tmp_path / "model"
        write_checkpoint(folder, config, make_weights(config), shards=shards)
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        hub.repo(REPO).commit(files)
        return files

    return publish


def content(folder: Path) -> dict[str, bytes]:
    """Return every file by its path below the folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def asked(hub: Hub) -> int:
    """Bytes of all ranges that were asked for."""
    ends = [seen.range.removeprefix("bytes=").split("-") for seen in hub.seen if seen.range]
    return sum(int(last) - int(first) + 1 for first, last in ends)


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("fp8-block", {"sizes": "blocky"}),
        ("bf16-split", {"sizes": "ragged"}),
        ("fp8-channel", {"moe": True}),
    ],
)
def test_a_stream_gives_what_a_copy_gives_receipt_included(publish, tmp_path, recipe, options):
    publish(**options)
    api.convert(
        REPO, tmp_path / "streamed", read_recipe(recipe), options=api.RunOptions(stream=True)
    )
    api.convert(REPO, tmp_path / "copied", read_recipe(recipe))
    assert content(tmp_path / "streamed") == content(tmp_path / "copied")


@pytest.mark.parametrize("out", ["out", "out.gguf"])
def test_side_files_in_folders_of_their_own_are_streamed_too(hub, tmp_path, out):
    source = embedder(tmp_path / "in")
    write(source, {"additional_chat_templates/tool_use.jinja": TOOL})
    hub.repo("maker/embedder").commit(content(source))
    for name, by_ranges in (("streamed", True), ("copied", False)):
        (tmp_path / name).mkdir()
        done = api.convert(
            "maker/embedder",
            tmp_path / name / out,
            read_recipe("bf16-split" if out == "out" else "gguf-q8_0"),
            options=api.RunOptions(stream=by_ranges),
        )
        assert done.report.passed
    assert content(tmp_path / "streamed") == content(tmp_path / "copied")
    if out == "out":
        assert {"out/1_Pooling/config.json", "out/additional_chat_templates/tool_use.jinja"} <= set(
            content(tmp_path / "streamed")
        )


def test_an_fp8_source_is_decoded_from_a_stream(publish, hub, tmp_path):
    publish(moe=True)
    api.convert(REPO, tmp_path / "fp8", read_recipe("fp8-block-hub"))
    hub.repo("maker/fp8").commit(content(tmp_path / "fp8"))
    for name, by_ranges in (("streamed", True), ("copied", False)):
        api.convert(
            "maker/fp8",
            tmp_path / name,
            read_recipe("bf16-split"),
            options=api.RunOptions(stream=by_ranges),
        )
    assert content(tmp_path / "streamed") == content(tmp_path / "copied")


def test_a_gguf_is_written_from_a_stream(hub, nano, tmp_path):
    hub.repo("maker/nano").commit(content(nano))
    for name, by_ranges in (("streamed", True), ("copied", False)):
        (tmp_path / name).mkdir()
        recipe = read_recipe("gguf-q8_0")
        api.convert(
            "maker/nano",
            tmp_path / name / "nano.gguf",
            recipe,
            options=api.RunOptions(stream=by_ranges),
        )
    assert content(tmp_path / "streamed") == content(tmp_path / "copied")


def test_predictions_are_compared_with_a_stream_s(hub, nano, tmp_path):
    hub.repo("maker/nano").commit(content(nano))
    (tmp_path / "text").write_text("In the beginning was the Word.")
    asked = ("verify.level=logits", f"verify.text={tmp_path / 'text'}")
    recipe = read_recipe("fp8-block", asked)
    done = api.convert("maker/nano", tmp_path / "out", recipe, options=api.RunOptions(stream=True))
    assert done.report.passed
    assert done.report.logits["kl_mean"] > 0


def test_scales_of_a_cache_are_those_of_a_copy(hub, nano, tmp_path):
    hub.repo("maker/nano").commit(content(nano))
    (tmp_path / "text").write_text("In the beginning was the Word. " * 100)
    asked = ("quantize.kv_cache=fp8", f"quantize.calibrate.text={tmp_path / 'text'}")
    recipe = read_recipe("fp8-block", asked)
    for name, by_ranges in (("streamed", True), ("copied", False)):
        options = api.RunOptions(stream=by_ranges)
        done = api.convert("maker/nano", tmp_path / name, recipe, options=options)
        assert done.report.passed, done.report.failures
    assert content(tmp_path / "streamed") == content(tmp_path / "copied")


def test_every_byte_is_asked_for_once_to_convert_and_once_to_verify(publish, hub, tmp_path):
    files = publish()
    size = sum(len(data) for name, data in files.items() if name.endswith(".safetensors"))
    api.convert(
        REPO, tmp_path / "once", options=api.RunOptions(stream=True, verify=False, workers=2)
    )
    once, few = asked(hub), 3 * stream.FIRST_BYTES  # headers, and the norms that planning looks at
    assert size <= once <= size + few
    hub.seen.clear()
    api.convert(REPO, tmp_path / "twice", options=api.RunOptions(stream=True, workers=2))
    assert asked(hub) <= 2 * size + few


def test_one_thread_reads_a_stream_unless_more_are_asked_for(publish, tmp_path, monkeypatch):
    """Several stand at places further apart than the memory reaches, and read blocks twice."""
    publish()
    run, workers = executor.run, []

    def noted(*arguments):
        workers.append(arguments[-1].workers)
        run(*arguments)

    monkeypatch.setattr(executor, "run", noted)
    monkeypatch.setattr(run_options, "default_workers", lambda: 8)
    for name, asked_for in (("one", None), ("two", 2)):
        api.convert(
            REPO,
            tmp_path / name,
            options=api.RunOptions(stream=True, verify=False, workers=asked_for),
        )
    api.convert(REPO, tmp_path / "copied", options=api.RunOptions(verify=False))
    assert workers == [1, 2, 8]


def test_a_run_goes_on_after_the_files_that_were_proven(publish, hub, tmp_path, monkeypatch):
    files = publish(shards=3)
    last = sorted(name for name in files if name.endswith(".safetensors"))[-1]
    hub.fail("GET", last, *[Fault(503, at=len(files[last]) - 1)] * 40)
    out = tmp_path / "out"
    with pytest.raises(FetchError, match=last) as caught:
        api.convert(REPO, out, options=api.RunOptions(stream=True, workers=1, verify=False))
    assert str(partial_of(out)) in caught.value.left
    hub.heal()
    hub.seen.clear()
    api.convert(REPO, out, options=api.RunOptions(stream=True, workers=1, verify=False))
    whole = {name for name in files if count_blocks(hub, name) > 1}
    assert whole == {last}, "of the others, nothing but headers and norms"


def count_blocks(hub: Hub, name: str) -> int:
    found = 0
    for seen in hub.seen:
        if seen.range and seen.path.endswith(name):
            first, last = map(int, seen.range.removeprefix("bytes=").split("-"))
            found += last - first + 1 == BLOCK and first % BLOCK == 0
    return found


def test_a_wrong_byte_leaves_no_row_of_its_file_in_the_journal(publish, hub, tmp_path):
    files = publish(shards=1)
    middle = len(files["model.safetensors"]) // 2
    hub.fail("GET", "model.safetensors", Fault(flip=7, at=middle))
    with pytest.raises(FetchError, match="not what the hub lists"):
        api.convert(REPO, tmp_path / "out", options=api.RunOptions(stream=True, workers=2))
    journal = (partial_of(tmp_path / "out") / "journal").read_text().splitlines()
    assert len(journal) == 1, "nothing but the plan's digest"


def test_a_token_never_reaches_the_cdn(publish, hub, tmp_path, monkeypatch):
    publish()
    hub.repos[REPO].gated = True
    hub.tokens.add(TOKEN)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    api.convert(REPO, tmp_path / "out", options=api.RunOptions(stream=True, verify=False))
    assert {s.authorization for s in hub.seen if s.server == "hub"} == {f"Bearer {TOKEN}"}
    assert {s.authorization for s in hub.seen if s.server == "cdn"} == {""}


@pytest.mark.parametrize("out", ["out", "out.gguf"])
def test_a_plan_reads_headers_and_norms_only(hub, nano, tmp_path, monkeypatch, out):
    monkeypatch.setattr(stream, "FIRST_BYTES", 1 << 12)
    files = content(nano)
    hub.repo(REPO).commit(files)
    planned = api.plan(REPO, out=out)
    assert asked(hub) - sum(map(len, sides(files))) < 0.1 * sum(map(len, files.values()))
    assert not (tmp_path / "home").exists(), "nothing is written"
    fetch(REPO, progress=False)
    hub.seen.clear()
    again = api.plan(REPO, out=out)
    assert replace(again, files=planned.files) == planned
    assert again.files.keys() == planned.files.keys()
    assert hub.got() == [], "this time from the cache"


def sides(files: dict[str, bytes]) -> list[bytes]:
    return [data for name, data in files.items() if not name.endswith(".safetensors")]


def test_an_inspection_reads_headers_only(publish, hub, tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "FIRST_BYTES", 1 << 12)
    files = publish()
    found = inspect(REPO).as_dict(tensors=True)
    assert asked(hub) - sum(map(len, sides(files))) < 0.1 * sum(map(len, files.values()))
    local = inspect(tmp_path / "model").as_dict(tensors=True)
    assert found | {"serving": local["serving"]} == local
    assert not (tmp_path / "home").exists(), "nothing is written"


def test_a_copy_in_the_cache_is_looked_at_if_it_is_whole_and_of_this_commit(publish, hub):
    files = publish()
    cached = fetch(REPO, progress=False).path
    hub.seen.clear()
    assert inspect(REPO) == inspect(REPO)
    assert hub.got() == [], "only the listing is asked for"
    for name in ("config.json", "model-00001-of-00002.safetensors"):
        blob = (cached / name).resolve()
        blob.write_bytes(files[name].upper() if name == "config.json" else files[name][:-1])
        hub.seen.clear()
        assert inspect(REPO).tensors
        assert hub.got() != [], f"{name} is not whole"
        blob.write_bytes(files[name])
    hub.repo(REPO).commit(files | {"README.md": b"another commit"})
    hub.seen.clear()
    assert api.plan(REPO).items
    assert hub.got() != []


def test_offline_the_cache_is_looked_at(publish, hub, monkeypatch):
    publish()
    online = inspect(REPO)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FetchError, match="offline"):
        inspect(REPO)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    fetch(REPO, progress=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.seen.clear()
    assert inspect(REPO) == online
    assert hub.seen == []


def test_a_header_longer_than_the_first_bytes_is_read_whole(publish, monkeypatch):
    index = json.loads(publish()["model.safetensors.index.json"])
    monkeypatch.setattr("qwen35_convert.hub.ranges.OWN_PAGES", 4)
    for first in (8, 1 << 18, 1 << 20):
        monkeypatch.setattr(stream, "FIRST_BYTES", first)
        assert stream.open_stream(REPO)[0].where == index["weight_map"]


def test_tensors_without_bytes_cannot_be_computed_with(publish):
    publish()
    opened, _ = stream.open_stream(REPO)
    tensor = opened.read(next(iter(opened.infos())))
    assert tensor.is_meta
    with pytest.raises(NotImplementedError):
        tensor.float().cpu()


def test_whoever_waits_for_a_busy_server_is_woken_when_work_is_abandoned():
    stop, naps = Event(), []
    stop.set()
    with pytest.raises(InterruptedError):
        stream._nap(stop, naps.append, 300.0)
    assert naps == []


def test_a_shard_without_a_hash_can_be_looked_at_but_not_streamed(publish, tmp_path, monkeypatch):
    publish()
    monkeypatch.setattr("tests.qwen35_convert.hub.hub_server.LFS", ())
    assert api.plan(REPO, stream=True).items
    with pytest.raises(FetchError, match="no SHA-256"):
        api.convert(REPO, tmp_path / "out", options=api.RunOptions(stream=True))


def test_the_receipt_of_a_slice_says_that_its_files_are_not_proven(publish, tmp_path):
    publish()
    api.convert(
        REPO,
        tmp_path / "out",
        overrides=('only="layers.0.*"',),
        options=api.RunOptions(stream=True),
    )
    source = json.loads((tmp_path / "out/qwen35-receipt.json").read_text())["source"]["files"]
    assert {said["sha256"] for said in source.values()} == {None}
