"""still for PyTorch: its attention as an operator, and its adapters in models of
transformers. PyTorch is needed for this module alone, and transformers only to make the model
that `patch` takes.

    from still.torch import hybrid_attention, patch
"""

from __future__ import annotations

from ._torch_attention import hybrid_attention
from ._torch_patch import HybridAttention, patch

__all__ = ["HybridAttention", "hybrid_attention", "patch"]
