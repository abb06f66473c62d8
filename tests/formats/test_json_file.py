"""JSON from outside: what is not strict JSON is refused, and the message says which."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.errors import FormatError
from formats.json_file import parse_object, read_object

scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text()
scalars |= st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=6
)


@settings(max_examples=40)
@given(st.dictionaries(st.text(max_size=9), values, max_size=4))
def test_what_json_writes_is_read_back(value):
    assert parse_object(json.dumps(value, allow_nan=False).encode(), "x") == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a": 1, "b": 2, "a": 1}', "key 'a' is duplicated"),
        (b'{"n": {"a": 1, "a": 2}}', "key 'a' is duplicated"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"a": 1e400}', "1e400 is too large"),
        (b'{"a": [-1e400]}', "-1e400 is too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"a": "\xff"}', "not JSON: 'utf-8'"),
        (b'{"a": "\xed\xa0\x80"}', "not JSON: 'utf-8'"),
        ('{"a": 1}'.encode("utf-16"), "not JSON"),
        (b'\xef\xbb\xbf{"a": 1}', "not JSON"),
        (b"", "not JSON"),
        (b'{"a": 1', "not JSON"),
        (b'{"a": 1} {}', "not JSON"),
        (b"[1]", "holds list, expected an object"),
        (b"null", "holds NoneType, expected an object"),
        (b'"text"', "holds str, expected an object"),
        (b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
        (b'{"a": ' + b'{"a": ' * 100_000 + b"1" + b"}" * 100_001, "nested too deeply"),
    ],
)
def test_what_is_not_strict_json_is_refused(text, message):
    with pytest.raises(FormatError, match=message) as caught:
        parse_object(text, "some.json")
    assert str(caught.value).startswith("some.json")


def test_a_repeated_key_is_found_in_linear_time():
    """A quadratic search takes minutes here."""
    pairs = ", ".join(f'"k{i}": 0' for i in range(200_000))
    with pytest.raises(FormatError, match="'last' is duplicated"):
        parse_object(f'{{{pairs}, "last": 1, "last": 2}}'.encode(), "x")


def test_a_file_is_read_up_to_its_limit(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b'{"a": 1}')
    assert read_object(path, limit=8) == {"a": 1}
    with pytest.raises(FormatError, match=r"config\.json has 8 bytes, expected at most 7"):
        read_object(path, limit=7)


@pytest.mark.parametrize("name", ["absent.json", "."])
def test_a_file_that_cannot_be_read_is_refused(tmp_path, name):
    with pytest.raises(FormatError, match="cannot be read"):
        read_object(tmp_path / name)
