"""Fixtures of the Ascend tests. Without the toolchain they fail with the install command."""

import pytest

from wyfast_lib.ascend import toolchain


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch):
    """An empty cache directory, with the installed toolchain still in use."""
    monkeypatch.setenv("WYFAST_ASCEND_TOOLCHAIN", str(toolchain.locate()))
    monkeypatch.setenv("WYFAST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
