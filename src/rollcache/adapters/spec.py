"""What rollcache must know about a model family, and nothing about any method."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from rollcache.fingerprint import Hidden
from rollcache.passes import Pass, RollcacheError, Segment
from rollcache.settings import check_choice
from rollcache.tokens import Tokens

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
Aux = Literal["none", "last", "omit"] | Callable[[Args, Kwargs], Any]
Returns = Literal["hidden", "hidden, encoder", "encoder, hidden", "hidden, aux"]
KVWrites = Literal["never", "commit_only", "every_forward", "last_step"]

_ALONE: Any = object()  # stands for the aux of a block that returned its hidden state alone


class _Rest(tuple[Any, ...]):
    """All that a block returned behind its hidden state in one tuple."""


@dataclass(frozen=True, kw_only=True)
class BlockIO:
    """How a block takes and returns its hidden state.

    The hidden state is a tensor `[B, ..., C]` or a list of them, one per view group. A text or context stream that the
    blocks pass on and change is the *encoder*: it is replayed with the hidden state but not looked at by gates.
    Anything else that a block returns behind its hidden state is its *aux*: nothing is added to it, and where the block
    is not run somebody has to say what stands in its place.

    Attributes:
        hidden: argument that holds the hidden state: its position, and its keyword for models that call blocks by name.
        encoder: the same for the encoder stream; None if there is none.
        returns: what comes out. With `hidden, aux` a block may return its hidden state alone, or a tuple that begins
            with it, of any length: `(h,)` and `(h, attention, kv)` are this form as well.
        aux: what a block that is not run returns beside its hidden state. `none` is None; `last` what it returned when
            it was last run in this branch of the rollout (kept as it is, not copied, and not counted as memory);
            `omit` returns the hidden state alone, where the model takes that as well; a function makes it of the
            arguments of the call, e.g. passes one of them on.
        in_place: blocks write into their input. Found out by itself in most cases; declaring it is always safe.
    """

    hidden: tuple[int, str] = (0, "hidden_states")
    encoder: tuple[int, str] | None = None
    returns: Returns = "hidden"
    aux: Aux = "none"
    in_place: bool = False

    def __post_init__(self) -> None:
        check_choice("BlockIO.returns", self.returns, Returns)
        if (self.encoder is None) != ("encoder" not in self.returns):
            raise ValueError(f"returns={self.returns!r} does not go with encoder={self.encoder!r}.")
        if self.aux != "none" and self.returns != "hidden, aux":
            raise ValueError(f"aux={self.aux!r} does not go with returns={self.returns!r}.")
        if not callable(self.aux) and self.aux not in ("none", "last", "omit"):
            raise ValueError(f"aux must be 'none', 'last', 'omit' or a function, got {self.aux!r}.")

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
        if self.returns == "hidden, aux":
            return _tensors(output[0] if isinstance(output, tuple) and output else output)
        if not isinstance(output, tuple | list) or len(output) != 2:
            raise RollcacheError(f"a block should return ({self.returns}), it returned {_name(output)}.")
        hidden, encoder = output if self.returns == "hidden, encoder" else reversed(output)
        return (*_tensors(hidden), *_tensors(encoder))

    def misfit(self, args: Args, kwargs: Kwargs, output: Any) -> str:
        """What is wrong with the form of an output, in view of what the block was called with; empty if nothing is."""
        if not isinstance(output, tuple | list) or not isinstance(_argument(self.hidden, args, kwargs), Tensor):
            return ""
        if self.returns == "hidden" and type(output) is tuple:
            return (
                f"takes a tensor and returns {_name(output)}: describe it with "
                "BlockIO(returns='hidden, aux', aux='last'), or with an encoder stream."
            )
        if self.returns in ("hidden", "hidden, aux") and type(output) is not tuple:
            return f"takes a tensor and returns {_name(output)}: only a tensor or a plain tuple can be repeated."
        return ""

    def aside(self, output: Any) -> Any:
        """What a block returned beside its hidden state, in the form that `emit` takes."""
        return _Rest(output[1:]) if self.returns == "hidden, aux" and isinstance(output, tuple) else _ALONE

    def stand_in(self, args: Args, kwargs: Kwargs, last: Callable[[], Any]) -> Any:
        """What a block that is not run returns beside its hidden state; `last` gives what it returned when it was."""
        if callable(self.aux):
            return self.aux(args, kwargs)
        return last() if self.aux == "last" else _ALONE if self.aux == "omit" else None

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

    def emit(self, streams: Hidden, args: Args, kwargs: Kwargs, aux: Any = None) -> Any:
        """What a block would return, made of `streams`, and of what `aside` or `stand_in` gave."""
        given = _argument(self.hidden, args, kwargs)
        tensors = self.gated(streams)
        hidden = tensors[0] if isinstance(given, Tensor) else type(given)(tensors)
        if self.returns == "hidden":
            return hidden
        if self.returns == "hidden, aux":
            return hidden if aux is _ALONE else (hidden, *aux) if isinstance(aux, _Rest) else (hidden, aux)
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


def marked(model: Any, args: Args, kwargs: Kwargs) -> Pass | None:
    """In the place of `Adapter.locate`: the loop marks its passes."""
    raise RollcacheError(f"the adapter of {type(model).__name__} has no locate(): only marks tell where a call is.")


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """One model family.

    Attributes:
        blocks: the blocks of a model, in the order in which every pass calls them, each once.
        locate: where in the rollout a call of the model is: `(model, args, kwargs) -> Pass`. None lets the call through
            untouched. Whatever cannot be told for certain must raise. Without it the loop marks its passes, as with
            `enable(model, policy, blocks=...)`.
        io: how blocks take and return their hidden state.
        kv_writes: when K/V that later chunks attend to is written. With `every_forward` a replayed block leaves old K/V
            in its slot, so every chunk must end with a `COMMIT` pass in each branch, with `last_step` in a pass with
            `kv_write`; the engine insists on it.
        always_compute: indices of blocks that no method may leave out, since later blocks need what they do besides
            adding to the hidden state; -1 is the last. Or a function that names them, given the blocks.
        first_pass_exact: the first denoise pass of a chunk must be computed, in every branch: blocks move the window of
            their K/V in it, and those that were left out would stay behind. Or a function of the arguments of
            `locate` that says so of a chunk, asked at its first pass, e.g. only once the window is full.
        place: what the loop passes to `Cache.replays_chunk` and `Cache.skip_chunk` as a `Pass`, for loops that ask.
        latent: the noisy latent of every token [B, L, Z], from the arguments of the model.
        modulated: what block 0 attends with [B, L, C], from block 0 and its arguments. Default: its bare input.
        embedding: the timestep embedding that modulates the blocks, from block 0 and its arguments.
        sparse: how blocks run for chosen tokens. None: this family can repair tokens by `refresh` only.
        hint: what to look at first where a method across chunks never replays anything; said once, with that warning.
    """

    blocks: Callable[[Any], Sequence[nn.Module]]
    locate: Callable[[Any, Args, Kwargs], Pass | None] = marked
    io: BlockIO = BlockIO()
    kv_writes: KVWrites = "commit_only"
    always_compute: frozenset[int] | Callable[[Sequence[nn.Module]], Collection[int]] = frozenset()
    first_pass_exact: bool | Callable[[Any, Args, Kwargs], bool] = False
    place: Callable[[Any, Any], Pass] | None = None
    latent: Callable[[Any, Args, Kwargs], Tensor] | None = None
    modulated: Callable[[Any, Args, Kwargs], Tensor] | None = None
    embedding: Callable[[Any, Args, Kwargs], Tensor] | None = None
    sparse: SparseBlocks | None = None
    hint: str = ""

    def __post_init__(self) -> None:
        check_choice("Adapter.kv_writes", self.kv_writes, KVWrites)

    @property
    def denoising_writes(self) -> bool:
        """Whether denoise passes write K/V, so that a block that is left out leaves old ones in its slot."""
        return self.kv_writes in ("every_forward", "last_step")

    def required(self, blocks: Sequence[nn.Module]) -> frozenset[int]:
        """Indices of the blocks that are always computed, all from 0.

        Raises:
            RollcacheError: there is no such block.
        """
        named = self.always_compute(blocks) if callable(self.always_compute) else self.always_compute
        depth = len(blocks)
        for index in named:
            if not -depth <= index < depth:
                raise RollcacheError(f"always_compute names block {index}, but the model has {depth} blocks.")
        return frozenset(index % depth for index in named)
