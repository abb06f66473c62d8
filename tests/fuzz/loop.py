"""Fuzzing of one parser: by atheris where it is installed, else by a plain loop of mutations.

    python -m tests.fuzz.fuzz_gguf [--seconds 60] [--seed 0]

A parser may refuse its input by the error of its kind and by nothing else; an input on which it
does anything else, or on which it takes over two seconds, is kept in out/fuzz and the run fails.
Seeds lie in tests/hostile/corpus; atheris follows coverage and keeps what it finds in out/fuzz.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import random
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORPUS = ROOT / "tests" / "hostile" / "corpus"
FOUND = ROOT / "out" / "fuzz"
SLOW = 2.0
NUMBERS = (
    0,
    1,
    2,
    7,
    8,
    31,
    32,
    127,
    128,
    255,
    256,
    65535,
    65536,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)
MAX_BYTES = 1 << 16
Test = Callable[[bytes], object]


def seeds(name: str) -> list[bytes]:
    """Return the committed seeds of a parser."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


def mutate(data: bytes, others: Sequence[bytes], words: Sequence[bytes], r: random.Random) -> bytes:
    """Return the data with one to four changes."""
    part = data
    for _ in range(r.randint(1, 4)):
        at, gone = r.randint(0, len(part)), r.choice((0, 0, 1, 1, 2, 4, 8, 16, 64))
        old, more = part[at : at + gone], r.choice((_bits, _bytes, _number, _digits, _again))
        new = r.choice((b"", more(old, r), r.choice(words), _slice(r.choice(others), r)))
        part = part[:at] + new + part[at + gone :]
    return part[:MAX_BYTES]


def _bits(old: bytes, r: random.Random) -> bytes:
    return bytes(byte ^ (1 << r.randrange(8)) for byte in old)


def _bytes(_: bytes, r: random.Random) -> bytes:
    return r.randbytes(r.choice((1, 1, 2, 8)))


def _number(_: bytes, r: random.Random) -> bytes:
    return struct.pack("<Q", r.choice(NUMBERS))[: r.choice((1, 2, 4, 8))]


def _digits(_: bytes, r: random.Random) -> bytes:
    number = r.choice(NUMBERS)
    return str(r.choice((number, -number, number / 3))).encode()


def _again(old: bytes, r: random.Random) -> bytes:
    return old * r.choice((2, 3, 50))


def _slice(data: bytes, r: random.Random) -> bytes:
    start = r.randint(0, len(data))
    return data[start : start + r.randint(0, 64)]


def keep(name: str, data: bytes) -> Path:
    """Write an input that did harm where it is found again."""
    FOUND.mkdir(parents=True, exist_ok=True)
    path = FOUND / f"{name}-{hashlib.sha256(data).hexdigest()[:16]}"
    path.write_bytes(data)
    return path


def run_plain(name: str, test: Test, words: Sequence[bytes], seconds: float, seed: int = 0) -> int:
    """Mutate the seeds for so long and return how many inputs were tried; raise the first fault."""
    r, known, tried = random.Random(seed), seeds(name), 0
    pool = list(known)
    end = time.monotonic() + seconds
    for data in known:
        test(data)
    while time.monotonic() < end:
        data = mutate(r.choice(pool), pool, words, r)
        started = time.process_time()
        try:
            test(data)
        except BaseException:
            sys.stderr.write(f"{keep(name, data)}: after {tried} inputs\n")
            raise
        if time.process_time() - started > SLOW:
            raise TimeoutError(f"{keep(name, data)} takes over {SLOW} s")
        tried += 1
        if r.random() < 0.002:  # wander away from the seeds, for lack of coverage to follow
            pool[r.randrange(len(pool))] = data
            pool[r.randrange(len(pool))] = r.choice(known)
    return tried


def main(name: str, modules: Sequence[str], test: Test, words: Sequence[bytes]) -> None:
    """Fuzz a parser; `modules` are those whose coverage atheris follows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        tried = run_plain(name, test, words, asked.seconds, asked.seed)
        sys.stdout.write(f"{name}: {tried} inputs, none did harm (atheris is not installed)\n")
        return
    _run_atheris(name, modules, test, words, asked)


def _run_atheris(
    name: str, modules: Sequence[str], test: Test, words: Sequence[bytes], asked: argparse.Namespace
) -> None:
    import atheris

    for module in modules:
        for value in list(vars(sys.modules[module]).values()):
            if callable(value) and getattr(value, "__module__", "") == module:
                _follow(atheris, value)
    corpus = FOUND / f"{name}-corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    dictionary = FOUND / f"{name}.dict"
    escaped = ("".join(f"\\x{byte:02x}" for byte in word) for word in words)
    dictionary.write_text("".join(f'"{word}"\n' for word in escaped))
    arguments = [
        sys.argv[0],
        f"-max_total_time={asked.seconds}",
        f"-seed={asked.seed + 1}",
        f"-timeout={int(10 * SLOW)}",
        f"-max_len={MAX_BYTES}",
        f"-artifact_prefix={FOUND}/",
        f"-dict={dictionary}",
        "-rss_limit_mb=2048",
        "-print_final_stats=1",
        str(corpus),
        str(CORPUS / name),
    ]
    atheris.Setup(arguments, test)
    atheris.Fuzz()


def _follow(atheris: object, value: object) -> None:
    """Let atheris count the branches of a function, or of a class's methods."""
    functions = vars(value).values() if isinstance(value, type) else (value,)
    for function in functions:
        if hasattr(function, "__code__"):
            atheris.instrument_func(function)
