"""Where an artifact lies that failed its own verification: OUT.failed, a folder beside OUT.

It holds the files that OUT would have had, and the receipt with the verdict. A later failure of the
same OUT replaces it; nothing else there is ever replaced.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from formats.errors import FormatError
from formats.json_file import read_object
from qwen35_convert.errors import OutputError
from qwen35_convert.write.verdict import Verdict

SUFFIX = ".failed"
FIX = "choose another OUT, move it away, or add --no-verify"


def failed_of(out: Path) -> Path:
    """Return the folder of an artifact that failed its own verification."""
    return out.with_name(out.name + SUFFIX)


def check_failed(out: Path, receipt: str, source: Iterable[Path]) -> None:
    """Refuse an OUT beside which a failed artifact would replace the source or unrelated files.

    receipt  name of the receipt in OUT.failed
    """
    failed = failed_of(out)
    if any(failed.resolve() in path.resolve().parents for path in source):
        raise OutputError(f"{failed}, where a failed artifact goes, holds the source", fix=FIX)
    if failed.is_symlink() or (failed.exists() and not _is_ours(failed, receipt)):
        raise OutputError(str(failed), "exists", "nothing, or an artifact that failed", fix=FIX)


def _is_ours(failed: Path, receipt: str) -> bool:
    if not failed.is_dir():
        return False
    if not any(failed.iterdir()):
        return True
    try:
        verdict = read_object(failed / receipt).get("verdict")
    except FormatError:
        return False
    return isinstance(verdict, dict) and Verdict(verdict).failed
