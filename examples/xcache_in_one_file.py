"""X-Cache (arXiv 2604.20289) in one file, to be held beside the paper. Run it: `python examples/xcache_in_one_file.py`.

An autoregressive video model generates chunk after chunk, each in a few denoising steps, each step through a stack of
transformer blocks. The input of block b at step t hardly changes from one chunk to the next. So X-Cache keeps what
every block *added* to its input, and adds that again instead of running the block, as long as the input looks the same.

The library does the same with less work (it decides about runs of blocks ahead, and adds a run in one go), more safety,
and for real models. A test holds the two against each other: same decisions, same numbers.
"""

import torch

FRONT_BLOCKS = 1  # F_n   always computed, so that the current conditions enter the hidden state
WARMUP_CHUNKS = 1  # W     computed in full
MIN_COSINE = 0.97  # tau_floor
MARGIN = 0.02  # m
EMA_ALPHA = 0.3  # alpha
MAX_DEVIATION = 2.0  # tau_dev
TOKENS = 32  # K     tokens that are looked at
EPS = 1e-6


def split_budget(grid, budget=TOKENS):
    """2.3.1: how many indices of each axis (F, H, W) to look at, in proportion to the axes, about `budget` in all."""
    counts = list(grid)
    free = [0, 1, 2]
    if counts[0] * counts[1] * counts[2] <= budget:
        return counts
    while True:
        volume = 1
        for axis in free:
            volume *= grid[axis]
        scale = (budget / volume) ** (1 / len(free))
        too_short = [axis for axis in free if grid[axis] * scale < 1]
        if not too_short:
            break
        for axis in too_short:  # less than one index: one, and the others share the budget
            counts[axis] = 1
            free.remove(axis)
    for axis in free:
        counts[axis] = min(grid[axis], max(1, round(grid[axis] * scale)))
    while counts[0] * counts[1] * counts[2] > budget:
        widest = max((a for a in free if counts[a] > 1), key=lambda a: (counts[a] / grid[a], counts[a]))
        counts[widest] -= 1
    return counts


def sampled_tokens(grid):
    """2.3.1: indices of the tokens on a uniform grid, out of F*H*W tokens in row-major order."""
    axes = []
    for length, count in zip(grid, split_budget(grid), strict=True):
        axes.append([length // 2] if count == 1 else [int(i * (length - 1) / (count - 1) + 0.5) for i in range(count)])
    _, height, width = grid
    return [(f * height + h) * width + w for f in axes[0] for h in axes[1] for w in axes[2]]


def cosine(a, b):
    """Eq. 5 for one entry. Two zero vectors are alike (a car that stands still), one alone resembles nothing."""
    a, b = a.flatten().float(), b.flatten().float()
    size_a, size_b = a.norm(), b.norm()
    if size_a < EPS or size_b < EPS:
        return float(size_a < EPS and size_b < EPS)
    return float(a @ b / (size_a * size_b))


class XCache:
    """Runs a stack of blocks. `grid` is the token grid (F, H, W) of the hidden state [1, F*H*W, C]."""

    def __init__(self, blocks, grid):
        self.blocks = blocks
        self.tokens = sampled_tokens(grid)
        self.stored = {}  # (t, b) -> residual, and the fingerprint of the input it was computed from
        self.ema = {}  # (t, b) -> running mean of the similarity
        self.log = []  # (n, t, b, skipped, similarity, threshold)

    def fingerprint(self, h, action):
        """2.3: a few tokens, the mean of all tokens, and the action that the blocks are conditioned on."""
        return h[:, self.tokens], h.mean(1), action.clone()

    def __call__(self, h, n, t, action, kv_update, *context):
        """One denoising step `t` of chunk `n`. `kv_update`: this chunk's latent will be written to the K/V cache."""
        for b, block in enumerate(self.blocks):
            if b < FRONT_BLOCKS:  # 2.5 (2): anchor block
                h = block(h, *context)
                continue

            now, key = self.fingerprint(h, action), (t, b)
            forced = n < WARMUP_CHUNKS or kv_update  # 2.2.3, and 2.5 (3): exact, but it refreshes the cache
            skip, similarity, threshold = False, None, MIN_COSINE
            if key in self.stored and n >= WARMUP_CHUNKS:
                _, then = self.stored[key]
                similarity = min(cosine(a, b) for a, b in zip(now, then, strict=True))  # Eq. 5
                change = (now[0] - then[0]).abs().max()
                deviation = float(change / (then[0].abs().mean() + EPS))  # Eq. 6
                mean = self.ema.get(key, similarity)
                if key in self.ema:
                    threshold = max(MIN_COSINE, mean - MARGIN)  # Eq. 9
                skip = similarity >= threshold and deviation < MAX_DEVIATION and not forced  # Eq. 7
                self.ema[key] = EMA_ALPHA * similarity + (1 - EMA_ALPHA) * mean  # Eq. 8

            if skip:
                h = h + self.stored[key][0]  # Eq. 4
            else:
                out = block(h, *context)
                self.stored[key] = (out - h, now)  # Eq. 3
                h = out
            self.log.append((n, t, b, skip, similarity, threshold))
        return h


# A toy world: a window that is denoised again at every chunk, from the same noise within a K/V cycle of four chunks,
# under an action that the "driver" changes now and then. This is the loop in which X-Cache has something to harvest.

GRID, WIDTH, DEPTH, STEPS, KV_EVERY = (2, 4, 6), 16, 6, 4, 4


class Block(torch.nn.Module):
    """Mixes tokens and channels, under an action."""

    def __init__(self, seed):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.w = torch.nn.Parameter(torch.randn(2, WIDTH, WIDTH, generator=g) / WIDTH**0.5)
        self.condition = torch.nn.Parameter(torch.randn(2, WIDTH, generator=g))

    def forward(self, h, action):
        """Hidden state [1, L, C] to hidden state."""
        mixed = torch.tanh((h + h.mean(1, keepdim=True)) @ self.w[0] + action @ self.condition)
        return h + 0.3 * mixed @ self.w[1]


def drive(stack, actions):
    """The loop; `stack(h, n, t, action, kv_update)` is one pass. Returns the window of every chunk."""
    g = torch.Generator().manual_seed(1)
    context, windows = torch.zeros(1, 48, WIDTH), []
    for n, action in enumerate(actions):
        kv_update = n % KV_EVERY == 0
        if kv_update:  # new noise, and what was generated becomes the context: the chunk that must be exact
            noise = torch.randn(1, 48, WIDTH, generator=g)
            context = windows[-1] if windows else context
        x = noise
        for t in range(STEPS):
            x = x + (torch.tanh(stack(x + 0.1 * context, n, t, action, kv_update)) - x) / (STEPS - t)
        windows.append(x)
    return windows


def main():
    """Drive straight, turn, drive on; once in full and once with X-Cache."""
    torch.set_grad_enabled(False)
    blocks = [Block(seed) for seed in range(DEPTH)]
    turn = [0.0] * 5 + [0.1, 0.6, 0.6, 0.6, 0.3] + [0.0] * 6
    actions = [torch.tensor([1.0, yaw]) for yaw in turn]

    def full(h, n, t, action, kv_update):
        for block in blocks:
            h = block(h, action)
        return h

    cache = XCache(blocks, GRID)
    reference = drive(full, actions)
    cached = drive(lambda h, n, t, action, kv_update: cache(h, n, t, action, kv_update, action), actions)
    print("chunk  yaw rate  blocks skipped  relative error of the window")
    for n, (a, b) in enumerate(zip(reference, cached, strict=True)):
        skipped = [skip for m, _, _, skip, _, _ in cache.log if m == n]
        error = float((a - b).norm() / a.norm())
        print(f"{n:5d} {turn[n]:9.1f} {sum(skipped):9d} of {DEPTH * STEPS} {error:20.6f}")
    after = [skip for n, _, _, skip, _, _ in cache.log if n >= WARMUP_CHUNKS]
    ceiling = (1 - 1 / KV_EVERY) * (1 - FRONT_BLOCKS / DEPTH)
    rate = sum(after) / (len(after) * DEPTH / (DEPTH - FRONT_BLOCKS))
    print(f"skip rate after warm-up {rate:.3f}; protection of every 4th chunk and of block 0 allow about {ceiling:.3f}")


if __name__ == "__main__":
    main()
