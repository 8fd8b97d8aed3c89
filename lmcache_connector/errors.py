"""Every error this package raises on purpose.

    ConnectorError
      StartupError             refused at start; carries every problem found, one sentence each
        ConfigError            an illegal, unknown or contradictory configuration value
        UnsupportedModelError  a KV cache group that cannot be cached correctly
        UnsupportedVllmError   a vLLM version or API that lacks a name relied on
      GeometryError            registered tensors or peers' geometries do not fit their description
      ProtocolError            a peer spoke another protocol, version or incarnation
      ExtractionError          rows of hidden states were given up by the engine that had them

Expected misses (absent object, deadline passed, pool full) are results, not errors.
"""

from __future__ import annotations


class ConnectorError(Exception):
    """Root of the tree."""


class StartupError(ConnectorError):
    """Refused at start. ``problems`` holds one sentence each: the cause and the fix."""

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(f"- {problem}" for problem in self.problems)


class ConfigError(StartupError):
    """An illegal, unknown or contradictory configuration value."""


class UnsupportedModelError(StartupError):
    """A KV cache group that cannot be cached correctly; names group, value and flag."""


class UnsupportedVllmError(StartupError):
    """A vLLM version or API that lacks a name relied on; names the supported range."""


class GeometryError(ConnectorError, ValueError):
    """Registered tensors or peers' geometries do not fit their description."""


class ProtocolError(ConnectorError):
    """A peer spoke another protocol, version or incarnation."""


class ExtractionError(ConnectorError):
    """Rows of hidden states were given up by the engine that had them; says why."""
