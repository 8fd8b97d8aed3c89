"""KV cache connector for hybrid LLMs on vLLM: restores bit for bit, or recomputes.

Importing this package loads neither torch nor vLLM.
"""

from __future__ import annotations

CONNECTOR_NAME = "LMCacheHybridConnector"
CONNECTOR_MODULE = "lmcache_connector.connector"

__version__ = "0.1.0"
__all__ = ["CONNECTOR_MODULE", "CONNECTOR_NAME", "__version__", "register"]


def register() -> None:
    """The ``vllm.general_plugins`` entry point: makes the connector known by its name.

    vLLM calls it in every process, sometimes more than once.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)
