"""What vLLM's engine on a CPU imports of ours, as its `worker_extension_cls`, before it makes its KV cache.

vLLM's CPU attention reads whole KV blocks, also the part that no token of the request has written yet, and
weighs it with zero. Zero times NaN, left there by a tenant of overflowing weights, is NaN in another's turn.
So every block is zeroed before it is given out, as vLLM does for models whose kernels need it.
"""

from __future__ import annotations

from vllm.v1.kv_cache_interface import KVCacheConfig


class CleanBlocks:
    """An empty part of vLLM's worker class; its import does the work."""


KVCacheConfig.needs_kv_cache_zeroing = property(lambda self: True)
