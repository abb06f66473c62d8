"""Which worker runs which tests: as pytest-xdist's loadgroup does, without its quadratic count.

xdist keeps every test that a worker was ever given and counts them all after each test: of ten
thousand tests that takes six core seconds. Here a unit of work is forgotten once it is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdist.scheduler import LoadGroupScheduling

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController


class ShortMemory(LoadGroupScheduling):
    """Groups of tests for workers; of those that are done nothing is kept."""

    def mark_test_complete(
        self, node: WorkerController, item_index: int, duration: float = 0
    ) -> None:
        nodeid = self.registered_collections[node][item_index]
        units, scope = self.assigned_work[node], self._split_scope(nodeid)
        units[scope][nodeid] = True
        if all(units[scope].values()):
            del units[scope]
        self._reschedule(node)
