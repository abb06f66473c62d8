"""Our GGUF files of the bundled model are those of llama.cpp's converter, to the key and the byte.

The order of tensors is free. `gguf_record` says how the record is made.
"""

from __future__ import annotations

import json

import pytest

from tests.gguf_record import CASES, GOLDEN, NANO, convert, describe, differences


@pytest.mark.parametrize("case", list(CASES))
def test_our_file_is_that_of_llama_cpp(case, tmp_path):
    theirs = json.loads(GOLDEN.read_text())[case]
    assert differences(describe(convert(NANO, tmp_path, case)), theirs) == []
