"""What a piece of work frees is used by the next, or leaves the process: glibc's own rules keep it.

glibc raises the size from which it maps memory with every larger piece that is freed, and each
thread has a heap of its own, which keeps what the thread freed: two runs differ by 100 MB.
"""

from __future__ import annotations

import ctypes

# numbers of malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
KEPT, ARENAS = 32 << 20, 1


def share_heap(*, mapped_from: int) -> None:
    """Share one heap among threads; pieces of `mapped_from` bytes leave as they are freed.

    Smaller pieces are faster: pages that the kernel maps anew cost 2.7 us each. Elsewhere than
    under glibc nothing is changed.
    """
    give_back_heap()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, mapped_from)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT)
        libc.mallopt(M_ARENA_MAX, ARENAS)


def give_back_heap() -> None:
    """Give the pages between what is held back to the system: what comes next counts what is left.

    Of a pass over a text 0.18 GB, by 20 ms.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
