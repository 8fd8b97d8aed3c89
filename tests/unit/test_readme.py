"""The README's configuration table is the parser's."""

from __future__ import annotations

from pathlib import Path

from lmcache_connector.config import config_table

ROOT = Path(__file__).resolve().parents[2]


def test_configuration_table() -> None:
    assert config_table().strip() in (ROOT / "README.md").read_text()
