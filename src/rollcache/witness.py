"""Is this tensor still what it was? Blocks and models that write in place must not corrupt residuals."""

from __future__ import annotations

import torch

from rollcache.fingerprint import Hidden, Sampler


class Witness:
    """Remembers a hidden state, to tell later whether it is still the same and was not written to.

    Autograd's version counters tell. Tensors made under `inference_mode` have none: there a few tokens are compared, in
    the first chunk only, and what was found there is trusted afterwards.
    """

    def __init__(self, hidden: Hidden, sampler: Sampler, probing: bool) -> None:
        """Take note of `hidden`."""
        self.hidden = hidden
        self._sampler = sampler
        blind = any(h.is_inference() for h in hidden)
        self._versions = None if blind else [h._version for h in hidden]
        self._tokens = sampler.tokens(hidden) if blind and probing else None

    def is_same(self, hidden: Hidden) -> bool:
        """Whether these are the very tensors."""
        return len(hidden) == len(self.hidden) and all(a is b for a, b in zip(hidden, self.hidden, strict=True))

    def untouched(self) -> bool:
        """Whether nobody wrote to them, as far as can be told."""
        if self._versions is not None:
            return self._versions == [h._version for h in self.hidden]
        if self._tokens is None:
            return True
        return torch.equal(self._sampler.tokens(self.hidden), self._tokens)
