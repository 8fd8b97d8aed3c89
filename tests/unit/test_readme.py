"""The documents' configuration tables are the parsers'."""

from __future__ import annotations

from pathlib import Path

from lmcache_connector.config import OPTIONS
from lmcache_connector.hidden_states.settings import ExtractChoice, ExtractSettings

ROOT = Path(__file__).resolve().parents[2]


def config_table() -> str:
    """The options as a markdown table."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for option in OPTIONS:
        default = option.show(option.parse(option.default))
        lines.append(f"| `{option.name}` | `{default}` | {option.help} |")
    return "\n".join(lines) + "\n"


def test_configuration_table() -> None:
    assert config_table().strip() in (ROOT / "README.md").read_text()


def test_keys_of_extraction() -> None:
    text = (ROOT / "docs" / "hidden_states.md").read_text()
    text = text.partition("### Configuration")[2].partition("###")[0]
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| `")]
    assert [row[1].strip(" `") for row in rows] == list(ExtractSettings.__struct_fields__)
    assert {row[4].partition(":")[0].strip(" `") for row in rows} - {""} == {
        *ExtractChoice.__struct_fields__
    }
