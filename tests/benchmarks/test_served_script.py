"""Lines are run as they are shown; the server is asked over HTTP, and stopped."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import socket
import stat
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# An engine is no package that a CPU can have: this one says what it was told, and counts.
VLLM = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

words = sys.argv[1:]
assert words[0] == "serve", words
if "--kv-cache-dtype" in words:
    sys.exit("ValueError: no such cache")
drafts = "--speculative-config" in words

class Server(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if self.path == "/metrics" and drafts:
            self.wfile.write(b'# HELP\\nvllm:spec_decode_num_draft_tokens_total{{m="a"}} 30.0\\n')
            self.wfile.write(b"vllm:spec_decode_num_accepted_tokens_total 12.0\\n")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == words[1] and body["temperature"] == 0, body
        tokens = [body["prompt"][0]] * body["max_tokens"]
        self.send_response(200)
        self.end_headers()
        choice = {{"token_ids": tokens, "text": " ".join(words)}}
        self.wfile.write(json.dumps({{"choices": [choice]}}).encode())

HTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Server).serve_forever()
"""


@pytest.fixture
def script():
    return importlib.import_module("benchmarks.served")


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Put an engine of that name on the path."""
    engine = tmp_path / "bin" / "vllm"
    engine.parent.mkdir()
    engine.write_text(VLLM.format(python=sys.executable))
    engine.chmod(engine.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", os.pathsep.join([str(engine.parent), os.environ["PATH"]]))
    monkeypatch.chdir(ROOT)


@pytest.fixture
def port():
    """A port that nobody listens to."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


@pytest.mark.all
@pytest.mark.usefixtures("path")
def test_each_line_is_run_as_it_is_shown(script, nano, tmp_path, port):
    results, folder = tmp_path / "results.jsonl", tmp_path / "it's here"
    text = ROOT / "qwen35_convert" / "text" / "default_text.txt"
    options = ["--recipes", "fp8-block-hub", "--folder", str(folder), "--device", "cpu"]
    options += ["--results", str(results), "--added=--of-this machine", "--commit", "abc"]
    assert script.main([str(nano), "--text", str(text), *options, "--port", str(port)]) == 0
    found = [json.loads(line) for line in results.read_text().splitlines()]
    plain, draft = sorted(found, key=lambda line: "speculative" in line["line"])
    name = f"{nano.name}-fp8-block-hub"
    assert plain["line"] == f"vllm serve {name} --max-model-len 2048 --max-num-seqs 8"
    words = shlex.split(plain["line"].replace(name, shlex.quote(str(folder / name))))
    assert plain["text"] == " ".join([*words[1:], f"--of-this machine --port {port}"])
    assert (draft["drafted"], draft["accepted"], "drafted" in plain) == (30, 12, False)
    assert len(plain["greedy_common"]) == plain["prompts"] == 3


@pytest.mark.usefixtures("path")
def test_a_line_that_starts_nothing_is_told(script, nano, tmp_path, port):
    job = script.Job(nano, "fp8-block-hub", tmp_path)
    line = script.Line(job, "serve", "vllm serve x --kv-cache-dtype fp8", "")
    found = script.ask(line, port, {"prompts": [], "new_tokens": 1})
    assert (found["starts"], found["error"]) == (False, "ValueError: no such cache")
