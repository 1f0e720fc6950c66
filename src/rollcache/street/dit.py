"""The causal multi-camera diffusion transformer of the street world.

Windows of `F` latent frames are bidirectional inside and causal to each other through a rolling K/V cache. Even blocks
attend over time inside one camera, odd blocks across the seven cameras of one latent frame. Timestep and ego action
enter every block by adaLN-Zero. What stands and drives around the ego enters the even blocks by cross-attention, each
camera to the boxes it sees, and never touches a block's input. There is no cache logic of any acceleration method in
this file.

Shape letters: B batch, W windows, F latent frames of a window, N = W*F, P cells of the whole rig, L = N*P tokens,
C width, Z latent channels, V cameras of a view group, A action numbers per latent frame.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from rollcache.street.describe import FEATURES, Described, camera_features, distances
from rollcache.street.protocol import Where
from rollcache.street.rig import CELLS, FRAMES_PER_LATENT, RIG
from rollcache.street.scenery import ATTRIBUTES

ACTION_DIM = 2 * FRAMES_PER_LATENT  # (speed, yaw rate) of every pixel frame of a latent
ACTION_SCALE = (0.1, 3.0)  # model units: speed / (10 m/s), 3 * yaw rate / (rad/s)
ABSENT = 1e6  # squared cells to a token that does not exist: nothing attends so far
ACTION_SD = (9.0, 0.3)  # typical size of an action in m/s and rad/s: one unit of the scaled action test


def action_units(action: Tensor) -> Tensor:
    """Physical actions [..., 2k] (m/s, rad/s alternating) in model units."""
    return action * action.new_tensor(ACTION_SCALE).repeat(action.shape[-1] // 2)


@dataclass(frozen=True, kw_only=True)
class DiTConfig:
    """Sizes of the transformer."""

    channels: int = 24
    width: int = 192
    depth: int = 12
    heads: int = 3
    mlp: int = 4
    rank: int = 48
    window: int = 4
    kv_windows: int = 2

    def __post_init__(self) -> None:
        if self.width % self.heads or (self.width // self.heads) % 8:
            raise ValueError(f"width {self.width} must be heads ({self.heads}) times a multiple of 8.")


class WindowKV:
    """Rolling FIFO cache of the clean K/V of the last committed windows, for every temporal block and view group.

    Denoising passes only read it. A commit pass collects into `pending`; `commit()` appends all of it at once, so an
    exception in the middle of a pass leaves the cache as it was.
    """

    def __init__(self, windows: int) -> None:
        self.windows = windows
        self.entries: list[dict[tuple[int, int], tuple[Tensor, Tensor]]] = []  # oldest first
        self.pending: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._joined: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def read(self, block: int, group: int) -> tuple[Tensor, Tensor] | None:
        """K and V [B*V, heads, cached tokens, head width] of one block and group, or None while nothing is cached."""
        if not self.entries:
            return None
        key = (block, group)
        if key not in self._joined:
            k, v = zip(*(entry[key] for entry in self.entries), strict=True)
            self._joined[key] = (torch.cat(k, 2), torch.cat(v, 2))
        return self._joined[key]

    def commit(self) -> None:
        """Append the pending window and drop the oldest beyond `windows`."""
        self.entries = [*self.entries, self.pending][-self.windows :]
        self.pending, self._joined = {}, {}


@dataclass
class BlockContext:
    """What every block of one pass shares. `c`: condition [B, N, C]. `rope`: cos and sin [B, N, P, 1, head/2].

    `told`: tokens of what every camera sees, and of the scene [B, N, V, E + 1, C]. `far`: per view group the squared
    distance in cells from every cell to every token [B, N, V, 1, cells, E + 1], `ABSENT` where there is none. `tap`:
    where the blocks of a pass over one window leave the K/V that they attended to; see `rows.py`.
    """

    c: Tensor
    rope: tuple[Tensor, Tensor]
    told: Tensor
    far: list[Tensor]
    frames: int
    window: int
    kv: WindowKV | None
    commit: bool
    visible: int  # windows before its own that a window may attend to inside this pass
    tap: dict[Any, tuple[Tensor, ...]] | None = None

    def leave(self, key: Any, k: Tensor, v: Tensor) -> None:
        """Leave K/V at the tap, copied where they are part of something larger or will be committed."""
        if self.tap is not None:
            shared = (self.commit or x.untyped_storage().nbytes() > x.nbytes for x in (k, v))
            self.tap[key] = tuple(x.clone() if s else x for x, s in zip((k, v), shared, strict=True))


class Block(nn.Module):
    """One DiT block: attention (temporal per camera, or across cameras) and MLP, both gated by adaLN-Zero.

    A temporal block also attends to what its camera sees; that branch starts at zero.
    """

    def __init__(self, config: DiTConfig, index: int) -> None:
        super().__init__()
        c = config.width
        self.index, self.heads, self.temporal = index, config.heads, index % 2 == 0
        self.qkv = nn.Linear(c, 3 * c)
        self.proj = nn.Linear(c, c)
        self.up = nn.Linear(c, config.mlp * c)
        self.down = nn.Linear(config.mlp * c, c)
        self.q_scale = nn.Parameter(torch.ones(c // config.heads))
        self.k_scale = nn.Parameter(torch.ones(c // config.heads))
        self.mod_in = nn.Linear(c, config.rank)
        self.mod_out = nn.Linear(config.rank, 6 * c)
        nn.init.zeros_(self.mod_out.weight)
        nn.init.zeros_(self.mod_out.bias)
        if self.temporal:
            self.ask = nn.Linear(c, c)
            self.told = nn.Linear(c, 2 * c)
            self.answer = nn.Linear(c, c)
            self.fade = nn.Parameter(torch.linspace(0.5, -2.0, config.heads))  # log of the bias per squared cell
            nn.init.zeros_(self.answer.weight)
            nn.init.zeros_(self.answer.bias)

    def forward(self, h: Tensor, ctx: BlockContext) -> Tensor:
        """Hidden state [B, L, C] to hidden state [B, L, C]; the input is not modified."""
        mod = self.modulation(ctx).to(h.dtype)
        shift1, scale1, gate1, shift2, scale2, gate2 = mod.unsqueeze(2).chunk(6, -1)  # [B, N, 1, C]
        x = h.unflatten(1, (ctx.frames, CELLS))  # [B, N, P, C]
        a = self._norm(x, shift1, scale1)
        attend = self._attend_time if self.temporal else self._attend_views
        x = x + gate1 * self.proj(attend(self.qkv(a), ctx)).to(h.dtype)
        if self.temporal:
            x = x + self.answer(self._attend_told(x, ctx)).to(h.dtype)
        a = self._norm(x, shift2, scale2)
        x = x + gate2 * self.down(nnf.gelu(self.up(a))).to(h.dtype)
        return x.flatten(1, 2)

    def modulation(self, ctx: BlockContext) -> Tensor:
        """Shift, scale and gate of attention, then of the MLP [B, N, 6C]."""
        return self.mod_out(nnf.silu(self.mod_in(ctx.c.to(self.mod_in.weight.dtype))))

    def modulated(self, h: Tensor, ctx: BlockContext) -> Tensor:
        """What the attention of this block sees of hidden state [B, L, C]: [B, N, P, C]."""
        shift, scale = self.modulation(ctx).to(h.dtype).unsqueeze(2).chunk(6, -1)[:2]
        return self._norm(h.unflatten(1, (ctx.frames, CELLS)), shift, scale)

    def _norm(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        y = torch.addcmul(shift, nnf.layer_norm(x, x.shape[-1:]), 1 + scale)
        return y.to(self.qkv.weight.dtype)

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).unbind(-3)  # [B, N, P, heads, d]
        q = nnf.layer_norm(q, q.shape[-1:], self.q_scale.to(q.dtype))
        k = nnf.layer_norm(k, k.shape[-1:], self.k_scale.to(k.dtype))
        return q, k, v

    def _attend_views(self, qkv: Tensor, ctx: BlockContext) -> Tensor:
        q, k, v = self._split(qkv)
        ctx.leave(self.index, k, v)
        q, k, v = (t.flatten(0, 1).transpose(1, 2) for t in (q, k, v))  # [B*N, heads, P, d]
        out = nnf.scaled_dot_product_attention(q, k, v)
        return out.transpose(1, 2).flatten(2).unflatten(0, (-1, ctx.frames))

    def _attend_time(self, qkv: Tensor, ctx: BlockContext) -> Tensor:
        q, k, v = self._split(qkv)
        q, k = _rotate(q, *ctx.rope), _rotate(k, *ctx.rope)
        parts, start = [], 0
        for g, group in enumerate(RIG):
            views, cells = len(group.cameras), group.cells
            part = slice(start, start + views * cells)
            start += views * cells
            qg, kg, vg = (_by_camera(t[:, :, part], views) for t in (q, k, v))  # [B*V, heads, N*cells, d]
            out = self._attend_windows(qg, kg, vg, ctx, g, ctx.window * cells)
            out = out.unflatten(0, (-1, views)).unflatten(3, (ctx.frames, cells))  # [B, V, heads, N, cells, d]
            parts.append(out.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3))
        return torch.cat(parts, 2)

    def _attend_told(self, x: Tensor, ctx: BlockContext) -> Tensor:
        """Cross-attention of every cell to the boxes that its camera sees, less to those far away in the picture."""
        dtype = self.ask.weight.dtype
        q = self.ask(nnf.layer_norm(x, x.shape[-1:]).to(dtype)).unflatten(-1, (self.heads, -1))
        k, v = self.told(ctx.told.to(dtype)).unflatten(-1, (2, self.heads, -1)).unbind(-3)  # [B, N, V, E, heads, d]
        q, k = nnf.layer_norm(q, q.shape[-1:]), nnf.layer_norm(k, k.shape[-1:])
        slope = self.fade.exp().to(q.dtype)[:, None, None]
        parts, cell, view = [], 0, 0
        for g, (group, far) in enumerate(zip(RIG, ctx.far, strict=True)):
            views = len(group.cameras)
            part, seen = slice(cell, cell + views * group.cells), slice(view, view + views)
            cell, view = cell + views * group.cells, view + views
            qg = q[:, :, part].unflatten(2, (views, -1)).transpose(3, 4).flatten(0, 2)  # [B*N*V, heads, cells, d]
            kg, vg = (t[:, :, seen].transpose(3, 4).flatten(0, 2) for t in (k, v))
            if ctx.tap is not None and "told" in ctx.tap:
                ctx.leave((self.index, g, "told"), kg, vg)
            bias = -slope * far.flatten(0, 2).to(qg.dtype)
            out = nnf.scaled_dot_product_attention(qg, kg, vg, attn_mask=bias)
            parts.append(out.transpose(1, 2).flatten(2).unflatten(0, (*q.shape[:2], views)).flatten(2, 3))
        return torch.cat(parts, 2)

    def _attend_windows(self, q: Tensor, k: Tensor, v: Tensor, ctx: BlockContext, group: int, size: int) -> Tensor:
        """Window-causal attention: each window sees itself, `ctx.visible` windows before it, and the K/V cache."""
        cached = ctx.kv.read(self.index, group) if ctx.kv is not None else None
        if ctx.kv is not None and ctx.commit:
            ctx.kv.pending[self.index, group] = (k, v)
        outs = []
        for w in range(q.shape[2] // size):
            seen = slice(max(0, w - ctx.visible) * size, (w + 1) * size)
            kw, vw = k[:, :, seen], v[:, :, seen]
            if cached is not None:
                kw, vw = torch.cat((cached[0], kw), 2), torch.cat((cached[1], vw), 2)
            ctx.leave((self.index, group), kw, vw)
            outs.append(nnf.scaled_dot_product_attention(q[:, :, w * size : (w + 1) * size], kw, vw))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2)


class StreetDiT(nn.Module):
    """Velocity model v = eps - x0 of the street world.

    The network predicts what is left after the best linear guess from the noisy latent and the last clean latent
    before the window, with unit variance at every noise level; `forward` returns the full velocity.
    """

    def __init__(self, config: DiTConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or DiTConfig()
        c, z = config.width, config.channels
        self.embed = nn.Linear(2 * z + 1, c)
        self.place = nn.Parameter(torch.randn(CELLS, c) * 0.02)
        self.order = nn.Parameter(torch.randn(config.window, c) * 0.02)
        self.time_in, self.time_out = nn.Linear(128, c), nn.Linear(c, c)
        self.action_in, self.action_out = nn.Linear(ACTION_DIM, c), nn.Linear(c, c)
        self.blocks = nn.ModuleList([Block(config, i) for i in range(config.depth)])
        self.camera = nn.Linear(camera_features().shape[-1], c)
        self.box_in, self.box_out = nn.Linear(FEATURES, c), nn.Linear(c, c)
        self.scene = nn.Linear(ATTRIBUTES, c)
        nn.init.zeros_(self.camera.weight)
        nn.init.zeros_(self.camera.bias)
        self.head_mod = nn.Linear(c, 2 * c)
        self.head = nn.Linear(c, z)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.register_buffer("prior_sd", torch.full((config.window, z), 0.7))  # of x0 around the context latent
        self.register_buffer("bare_sd", torch.ones(z))  # of x0 without context

    @property
    def layout(self) -> tuple[tuple[str, int, tuple[int, int, int], int, int, int], ...]:
        """Token layout of one window: (group, views, (F, H, W), first token, view stride, frame stride)."""
        out, start = [], 0
        for group in RIG:
            views, (h, w) = len(group.cameras), group.grid
            out.append((group.name, views, (self.config.window, h, w), start, h * w, CELLS))
            start += views * h * w
        return tuple(out)

    def forward(
        self,
        z: Tensor,
        t: Tensor,
        action: Tensor,
        context: Tensor,
        known: Tensor,
        time: Tensor,
        *,
        told: Described | None = None,
        kv: WindowKV | None = None,
        commit: bool = False,
        where: Where | None = None,
    ) -> Tensor:
        """One pass.

        Args:
            z: noisy latents [B, N, P, Z], x_t = (1 - t) x0 + t eps.
            t: noise level of each window [B, W] in [0, 1].
            action: ego action per latent frame [B, N, A] in physical units (m/s, rad/s).
            context: last clean latent before each window [B, W, P, Z].
            known: 1 where `context` is given, 0 where not [B, W].
            time: latent-frame time of each window's first frame [B, W] (only differences matter).
            told: what every camera sees in each latent frame, with leading dimensions [B, N]; None tells nothing.
            kv: clean K/V of earlier windows; read, and written only when `commit`.
            commit: append this pass's K/V to `kv` (the pass must be clean: t = 0, one window).
            where: position in the rollout; the model ignores it, wrappers read it.

        Returns:
            Velocity [B, N, P, Z], float32.
        """
        window = self.config.window
        frames, windows = z.shape[1], t.shape[1]
        if frames != windows * window or z.shape[2:] != (CELLS, self.config.channels):
            raise ValueError(
                f"latents have shape {tuple(z.shape)}; expected [B, {windows * window}, {CELLS}, "
                f"{self.config.channels}] for {windows} window(s) of {window} latent frames."
            )
        if commit and (kv is None or windows != 1):
            raise ValueError("a commit pass needs a K/V cache and exactly one window.")
        dtype = self.embed.weight.dtype
        t_n = t.repeat_interleave(window, 1)[..., None, None]  # [B, N, 1, 1]
        known_n = known.repeat_interleave(window, 1)[..., None, None].to(z.dtype)
        context_n = context.repeat_interleave(window, 1) * known_n
        guess = self._linear_guess(z, t_n, context_n, known_n, windows)
        x = torch.cat((z, context_n, known_n.expand(-1, -1, CELLS, 1)), -1)
        order = self.order.repeat(windows, 1)[:, None]
        place = self.place + self.camera(camera_features(z.device).to(dtype)).repeat_interleave(
            _cells(z.device), 0, output_size=CELLS
        )
        h = self.embed(x.to(dtype)).float() + (place + order).float()  # [B, N, P, C]
        tokens, far = self._told(told, z)
        matmul = torch.get_autocast_dtype(z.device.type) if torch.is_autocast_enabled(z.device.type) else dtype
        ctx = BlockContext(
            c=self._condition(t, action),
            rope=_rope(time, window, self.config.width // self.config.heads, matmul),
            told=tokens,
            far=far,
            frames=frames,
            window=window,
            kv=kv,
            commit=commit,
            visible=self.config.kv_windows,
        )
        h = h.flatten(1, 2)
        for block in self.blocks:
            h = block(h, ctx)
        if commit:
            assert kv is not None
            kv.commit()
        shift, scale = self.head_mod(nnf.silu(ctx.c).to(dtype)).float().unsqueeze(2).chunk(2, -1)
        h = nnf.layer_norm(h.unflatten(1, (frames, CELLS)), h.shape[-1:])
        net = self.head(torch.addcmul(shift, h, 1 + scale).to(dtype)).float()
        return guess + self.spread(t, known) * net

    def _condition(self, t: Tensor, action: Tensor) -> Tensor:
        """Timestep and action embedding, [B, N, C], float32."""
        dtype = self.time_in.weight.dtype
        freq = torch.exp(torch.linspace(0, math.log(1000.0), 64, device=t.device))
        angle = t.float()[..., None] * freq  # [B, W, 64]
        e = torch.cat((angle.cos(), angle.sin()), -1).to(dtype)
        e = self.time_out(nnf.silu(self.time_in(e))).repeat_interleave(self.config.window, 1)
        a = self.action_out(nnf.silu(self.action_in(action_units(action.float()).to(dtype))))
        return (e + a).float()

    def _told(self, told: Described | None, z: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Tokens and distances of a `BlockContext`; the last token, of the scene itself, is near everywhere."""
        dtype = self.box_in.weight.dtype
        batch, frames = z.shape[:2]
        views = sum(len(group.cameras) for group in RIG)
        if told is None:
            tokens = self.scene(z.new_zeros(batch, frames, views, 1, ATTRIBUTES, dtype=dtype))
            return tokens, [z.new_zeros(batch, frames, len(g.cameras), 1, g.cells, 1) for g in RIG]
        boxes = self.box_out(nnf.silu(self.box_in(told.features.to(dtype))))  # [B, N, V, E, C]
        scene = self.scene(told.attributes.to(dtype))[:, :, None, None].expand(-1, -1, views, -1, -1)
        absent = torch.where(told.there, 0.0, ABSENT)  # [B, N, V, E]
        per_camera = [
            nnf.pad(d.clamp_max(100.0) + absent[:, :, v, None], (0, 1)) for v, d in enumerate(distances(told.rectangle))
        ]
        far, view = [], 0
        for group in RIG:
            far.append(torch.stack(per_camera[view : view + len(group.cameras)], 2).unsqueeze(3))
            view += len(group.cameras)
        return torch.cat((boxes, scene.to(boxes.dtype)), 3), far

    def spread(self, t: Tensor, known: Tensor) -> Tensor:
        """Standard deviation of v around the linear guess [B, N, 1, Z], at levels `t` and with `known` [B, W]."""
        window = self.config.window
        t_n = t.repeat_interleave(window, 1)[..., None, None]
        var = self._variance(known.repeat_interleave(window, 1)[..., None, None], t.shape[1])
        return (var / (var * (1 - t_n).square() + t_n.square()).clamp_min(1e-6)).sqrt()

    def _linear_guess(self, z: Tensor, t: Tensor, context: Tensor, known: Tensor, windows: int) -> Tensor:
        """E[v | z] when x0 is Gaussian around the context latent (around 0 without one)."""
        var = self._variance(known, windows)
        den = var * (1 - t).square() + t.square()
        return (t - var * (1 - t)) / den.clamp_min(1e-6) * (z - (1 - t) * context) - context

    def _variance(self, known: Tensor, windows: int) -> Tensor:
        return torch.where(known > 0, self.prior_sd.repeat(windows, 1)[:, None], self.bare_sd).square()


def _cells(device: torch.device) -> Tensor:
    """Cells of every camera, in rig order [V]."""
    return torch.tensor([group.cells for group in RIG for _ in group.cameras], device=device)


def _by_camera(x: Tensor, views: int) -> Tensor:
    """[B, N, V*cells, heads, d] to [B*V, heads, N*cells, d]."""
    return x.unflatten(2, (views, -1)).permute(0, 2, 4, 1, 3, 5).flatten(3, 4).flatten(0, 1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [B, N, P, heads, d] with tables [B, N, P, 1, d/2]."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def _rope(time: Tensor, window: int, head: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cos and sin tables [B, N, P, 1, head/2] over (latent time, row, column) of each camera."""
    device = time.device
    rows, columns = [], []
    for group in RIG:
        h, w = group.grid
        r, c = torch.meshgrid(torch.arange(h, device=device), torch.arange(w, device=device), indexing="ij")
        rows.append(r.flatten().repeat(len(group.cameras)))
        columns.append(c.flatten().repeat(len(group.cameras)))
    row, column = torch.cat(rows).float(), torch.cat(columns).float()
    half = head // 2
    n_time, n_row = half // 2, half // 4
    n_column = half - n_time - n_row
    when = (time[..., None] + torch.arange(window, device=device)).flatten(1).float()  # [B, N]
    angle = torch.cat(
        (
            (when[..., None] * _frequencies(n_time, 64.0, device))[:, :, None].expand(-1, -1, CELLS, -1),
            (row[:, None] * _frequencies(n_row, 16.0, device)).expand(*when.shape, -1, -1),
            (column[:, None] * _frequencies(n_column, 16.0, device)).expand(*when.shape, -1, -1),
        ),
        -1,
    )[..., None, :]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _frequencies(n: int, longest: float, device: torch.device) -> Tensor:
    """The n angular frequencies from 1 down to 1/longest."""
    return longest ** -torch.linspace(0, 1, n, device=device)
