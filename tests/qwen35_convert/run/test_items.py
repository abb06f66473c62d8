"""What schemes must know of whole matrices is found out once for each, side by side."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from qwen35_convert.run.worker import Preparation

SOURCE = SimpleNamespace(layout=SimpleNamespace(atoms={}))


def prepared(prepare, *matrices: str) -> list[object]:
    """Prepare an item of each matrix at the same time."""
    scheme = SimpleNamespace(name="counted", prepare=prepare)
    items = [SimpleNamespace(scheme=scheme, atom=SimpleNamespace(matrix=m)) for m in matrices]
    preparation = Preparation(SOURCE)
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(preparation.of, items))


def test_two_matrices_do_not_wait_for_each_other():
    both = threading.Barrier(2, timeout=30)
    assert sorted(prepared(lambda _: both.wait(), "one", "other")) == [0, 1]


def test_all_items_of_a_matrix_know_what_its_first_found_out():
    calls = []

    def prepare(_):
        calls.append(1)
        time.sleep(0.1)
        return object()

    assert len(set(map(id, prepared(prepare, "one", "one", "one")))) == 1
    assert len(calls) == 1


def test_a_scheme_may_have_to_know_nothing():
    assert prepared(lambda _: None, "one", "one") == [None, None]
