"""Kernels that move pages between paged KV tensors and contiguous slots.

Importable as ``lmcache_connector.triton_kernels`` only. vLLM probes for a top-level module named
``triton_kernels`` (OpenAI's MoE kernels); this package must never be taken for it.
"""

if __name__ == "triton_kernels":
    raise ImportError(
        "this is lmcache_connector.triton_kernels, not OpenAI's triton_kernels package; "
        "import it by its full name"
    )
