"""Notices a cache that is filled and never used."""

from __future__ import annotations

MIN_STORED_BYTES = 1 << 30
MIN_LOOKUPS = 200


class ServedWatch:
    """Warns once when a lot was stored and no lookup was ever served.

    Nothing else tells of it: a rule that stores one thing and asks for another, keys that never
    match, a pool too small for what lies between two uses.
    """

    def __init__(self) -> None:
        self._stored_bytes: dict[str, int] = {}
        self._lookups = 0
        self._done = False

    def observe_stored(self, num_bytes: int, group: str) -> None:
        """A row of ``group`` became visible; ``num_bytes`` over all shards."""
        self._stored_bytes[group] = self._stored_bytes.get(group, 0) + num_bytes

    def observe_served(self, tokens: int) -> None:
        """``tokens`` were restored. Ends the watch."""
        self._done = self._done or tokens > 0

    def observe_request(self) -> str | None:
        """A request was looked up. Returns the warning when it is due, once."""
        self._lookups += 1
        stored = sum(self._stored_bytes.values())
        if self._done or self._lookups < MIN_LOOKUPS or stored < MIN_STORED_BYTES:
            return None
        self._done = True
        groups = ", ".join(
            f"{group}: {num_bytes >> 20} MiB"
            for group, num_bytes in sorted(self._stored_bytes.items())
        )
        return (
            f"{stored / (1 << 30):.1f} GiB were stored ({groups}) and 0 tokens served in "
            f"{self._lookups} lookups. Where prompts do repeat, raise max_local_cpu_size, or see "
            "whether vLLM's own prefix cache already serves them; where they do not, the "
            "connector is of no use."
        )
