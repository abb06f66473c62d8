"""Which worker runs which tests: as pytest-xdist's loadgroup does, at a third of its cost.

xdist keeps every test that a worker was ever given and counts them all after each test, looks for
each test's place in the list of all, and has workers tell when a test starts, ends, and that its
fixtures passed: of ten thousand tests that takes more than twenty core seconds. Here a unit of
work is forgotten once it is done, and workers tell what is printed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from xdist.scheduler import LoadGroupScheduling

if TYPE_CHECKING:
    import pytest
    from xdist.workermanage import WorkerController

A_MESSAGE = 8  # tests; near the end one by one, so that no worker is left with several
UNHEARD = ("logstart", "logfinish")


class ShortMemory(LoadGroupScheduling):
    """Groups of tests for workers; of those that are done nothing is kept."""

    places: dict[str, int]

    def schedule(self) -> None:
        """Begin, when all workers have collected the same tests."""
        (first, *_) = self.registered_collections.values()
        self.places = {nodeid: i for i, nodeid in enumerate(first)}
        super().schedule()

    def mark_test_complete(
        self, node: WorkerController, item_index: int, duration: float = 0
    ) -> None:
        """Forget a test's unit once all of it is done."""
        nodeid = self.registered_collections[node][item_index]
        units, scope = self.assigned_work[node], self._split_scope(nodeid)
        units[scope][nodeid] = True
        if all(units[scope].values()):
            del units[scope]
        self._reschedule(node)

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Give a worker a unit, or several small ones."""
        most = A_MESSAGE if len(self.workqueue) > 50 * A_MESSAGE else 1
        units, nodeids = self.assigned_work.setdefault(node, {}), []
        while self.workqueue and len(nodeids) < most:
            scope, unit = self.workqueue.popitem(last=False)
            units[scope] = unit
            nodeids += [nodeid for nodeid, completed in unit.items() if not completed]
        node.send_runtest_some([self.places[nodeid] for nodeid in nodeids])


def begin_at_the_end(config: pytest.Config) -> None:
    """Have a worker import test files from the last to the first.

    Another one begins with the first, so each loads half of what pytest makes of their asserts.
    """
    paths = [Path(argument) for argument in config.args]
    files = [sorted(path.rglob("test_*.py")) if path.is_dir() else [path] for path in paths]
    config.args = [str(file) for some in files for file in some][::-1]


def tell_less(config: pytest.Config) -> None:
    """Have a worker tell what its run prints: no starts and ends, no fixtures that passed."""
    (worker,) = (
        plugin
        for plugin in config.pluginmanager.get_plugins()
        if type(plugin).__name__ == "WorkerInteractor"
    )
    tell = worker.sendevent

    def tell_some(name: str, **content: Any) -> None:
        report = content.get("data", {})
        passed = report.get("outcome") == "passed" and report.get("when") in ("setup", "teardown")
        if name not in UNHEARD and not passed:
            tell(name, **content)

    worker.sendevent = tell_some
