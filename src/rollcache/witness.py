"""Is this tensor still what it was? Blocks and models that write in place must not corrupt residuals."""

from __future__ import annotations

import torch
from torch import Tensor

from rollcache.fingerprint import Hidden, Sampler


class Witness:
    """Remembers a hidden state, to tell later whether it is still the same and was not written to.

    Autograd's version counters tell. Under `inference_mode` nothing is counted: there a few tokens are compared, in the
    first chunk only, and what was found there is trusted afterwards.
    """

    def __init__(self, hidden: Hidden, sampler: Sampler, probing: bool) -> None:
        """Take note of `hidden`; `probing` says that this is the first chunk."""
        self.hidden = hidden
        self._sampler = sampler
        blind = torch.is_inference_mode_enabled() or any(h.is_inference() for h in hidden)
        self._versions = None if blind else [h._version for h in hidden]
        self._tokens = self._look() if blind and probing else None

    def is_same(self, hidden: Hidden) -> bool:
        """Whether these are the very tensors."""
        return len(hidden) == len(self.hidden) and all(a is b for a, b in zip(hidden, self.hidden, strict=True))

    def untouched(self) -> bool:
        """Whether nobody wrote to them, as far as can be told."""
        if self._versions is not None:
            return self._versions == [h._version for h in self.hidden]
        return self._tokens is None or torch.equal(self._look(), self._tokens)

    def _look(self) -> Tensor:
        """A few tokens, bit by bit: not-a-number is equal to itself."""
        return self._sampler.tokens(self.hidden).contiguous().view(torch.int32)
