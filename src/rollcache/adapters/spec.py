"""What rollcache must know about a model family, and nothing about any method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from rollcache.fingerprint import Hidden
from rollcache.passes import Pass, RollcacheError, Segment
from rollcache.tokens import Tokens

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class BlockIO:
    """How a block takes and returns its hidden state.

    The hidden state is a tensor `[B, ..., C]` or a list of them, one per view group. A text or context stream that the
    blocks pass on and change is the *encoder*: it is replayed with the hidden state but not looked at by gates.

    Attributes:
        hidden: argument that holds the hidden state: its position, and its keyword for models that call blocks by name.
        encoder: the same for the encoder stream; None if there is none.
        returns: what comes out.
        in_place: blocks write into their input. Found out by itself in most cases; declaring it is always safe.
    """

    hidden: tuple[int, str] = (0, "hidden_states")
    encoder: tuple[int, str] | None = None
    returns: Literal["hidden", "hidden, encoder", "encoder, hidden"] = "hidden"
    in_place: bool = False

    def __post_init__(self) -> None:
        if (self.encoder is None) != (self.returns == "hidden"):
            raise ValueError(f"returns={self.returns!r} does not go with encoder={self.encoder!r}.")

    def read(self, args: Args, kwargs: Kwargs) -> Hidden:
        """All streams that a block is called with: the tensors of the hidden state, then the encoder."""
        streams = _tensors(_argument(self.hidden, args, kwargs))
        return streams if self.encoder is None else (*streams, *_tensors(_argument(self.encoder, args, kwargs)))

    def gated(self, streams: Hidden) -> Hidden:
        """The streams that gates look at."""
        return streams if self.encoder is None else streams[:-1]

    def parse(self, output: Any) -> Hidden:
        """All streams that a block returned, in the order of `read`."""
        if self.returns == "hidden":
            return _tensors(output)
        if not isinstance(output, tuple | list) or len(output) != 2:
            raise RollcacheError(f"a block should return ({self.returns}), it returned {_name(output)}.")
        hidden, encoder = output if self.returns == "hidden, encoder" else reversed(output)
        return (*_tensors(hidden), *_tensors(encoder))

    def replaced(self, streams: Hidden, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """The arguments of a call with `streams` instead of its own, in the order of `read`."""
        gated = self.gated(streams)
        given = _argument(self.hidden, args, kwargs)
        args, kwargs = list(args), dict(kwargs)  # type: ignore[assignment]
        values = {self.hidden: gated[0] if isinstance(given, Tensor) else type(given)(gated)}
        if self.encoder is not None:
            values[self.encoder] = streams[-1]
        for (position, name), value in values.items():
            if position < len(args):
                args[position] = value  # type: ignore[index]
            else:
                kwargs[name] = value
        return tuple(args), kwargs

    def emit(self, streams: Hidden, args: Args, kwargs: Kwargs) -> Any:
        """What a block would return, made of `streams`."""
        given = _argument(self.hidden, args, kwargs)
        tensors = self.gated(streams)
        hidden = tensors[0] if isinstance(given, Tensor) else type(given)(tensors)
        if self.returns == "hidden":
            return hidden
        return (hidden, streams[-1]) if self.returns == "hidden, encoder" else (streams[-1], hidden)


def _argument(which: tuple[int, str], args: Args, kwargs: Kwargs) -> Any:
    position, name = which
    if position < len(args):
        return args[position]
    if name in kwargs:
        return kwargs[name]
    raise RollcacheError(
        f"a block was called without its hidden state, argument {position} or {name!r}: describe it with BlockIO."
    )


def _tensors(value: Any) -> Hidden:
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, list | tuple) and value and all(isinstance(v, Tensor) for v in value):
        return tuple(value)
    raise RollcacheError(f"a hidden state must be a tensor or a list of tensors, got {_name(value)}. See BlockIO.")


def _name(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(_name(v) for v in value)})"
    return type(value).__name__


Slots = dict[Any, tuple[Tensor, ...]]
"""K/V of the tokens of a window, as the blocks of one pass left it; the keys are the adapter's own."""


class SparseBlocks(Protocol):
    """How the blocks of a model family run for chosen tokens alone."""

    def capture(self, args: Args, kwargs: Kwargs, slots: Slots) -> None:
        """Let the blocks of the pass that begins leave their K/V in `slots`; the arguments are those of block 0.

        What they leave must not be written to by the model afterwards.
        """
        ...

    def run(
        self,
        blocks: Sequence[nn.Module],
        hidden: Tensor,
        tokens: Tokens,
        segments: tuple[Segment, ...],
        args: Args,
        kwargs: Kwargs,
        slots: Slots,
    ) -> Tensor:
        """Run all blocks for chosen tokens.

        Their queries attend to the K/V in `slots`, in which their own rows are overwritten, and to the persistent K/V.

        Args:
            blocks: the model's own.
            hidden: what enters the stack for these tokens [B, k, C], in the order of `Tokens.rows`.
            tokens: which they are.
            segments: the token layout.
            args: of block 0 in this pass; the hidden state among them is that of all tokens.
            kwargs: likewise.
            slots: what `capture` left, updated in place.

        Returns:
            What leaves the stack for these tokens [B, k, C].
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """One model family.

    Attributes:
        blocks: the blocks of a model, in the order in which every pass calls them, each once.
        locate: where in the rollout a call of the model is: `(model, args, kwargs) -> Pass`. None lets the call through
            untouched. Whatever cannot be told for certain must raise.
        io: how blocks take and return their hidden state.
        kv_writes: when K/V that later chunks attend to is written. With `every_forward` a replayed block leaves old K/V
            in its slot, so every chunk must end with a `COMMIT` pass; the engine insists on it.
        place: what the loop passes to `Cache.replays_chunk` and `Cache.skip_chunk` as a `Pass`, for loops that ask.
        latent: the noisy latent of every token [B, L, Z], from the arguments of the model.
        modulated: what block 0 attends with [B, L, C], from block 0 and its arguments. Default: its bare input.
        embedding: the timestep embedding that modulates the blocks, from block 0 and its arguments.
        sparse: how blocks run for chosen tokens. None: this family can repair tokens by `refresh` only.
    """

    blocks: Callable[[Any], Sequence[nn.Module]]
    locate: Callable[[Any, Args, Kwargs], Pass | None]
    io: BlockIO = BlockIO()
    kv_writes: Literal["never", "commit_only", "every_forward", "last_step"] = "commit_only"
    place: Callable[[Any, Any], Pass] | None = None
    latent: Callable[[Any, Args, Kwargs], Tensor] | None = None
    modulated: Callable[[Any, Args, Kwargs], Tensor] | None = None
    embedding: Callable[[Any, Args, Kwargs], Tensor] | None = None
    sparse: SparseBlocks | None = None
