"""Procedural textures, made with numpy from fixed seeds: name -> uint8 [H, W, 3], tileable, sides a power of two."""

from __future__ import annotations

from functools import cache

import numpy as np

Array = np.ndarray


def _noise(rng: np.random.Generator, size: int, cells: int) -> Array:
    """Smooth tileable noise [size, size] in about -1..1."""
    grid = rng.standard_normal((cells, cells))
    t = np.arange(size) * cells / size
    i, f = t.astype(int), t - np.floor(t)
    f = f * f * (3 - 2 * f)
    rows = grid[i % cells] * (1 - f)[:, None] + grid[(i + 1) % cells] * f[:, None]
    return np.asarray(rows[:, i % cells] * (1 - f) + rows[:, (i + 1) % cells] * f)


def _spectral(rng: np.random.Generator, height: int, width: int) -> Array:
    """Tileable noise [height, width] without a grid's look: white noise with a falling spectrum, unit variance."""
    fy, fx = np.fft.fftfreq(height)[:, None] * height * 2.6, np.fft.rfftfreq(width)[None] * width
    power = np.hypot(fy, fx)
    shape = np.where(power > 0, 1.0 / np.maximum(power, 5.0) ** 2.2, 0.0)
    img = np.fft.irfft2(np.fft.rfft2(rng.standard_normal((height, width))) * shape, (height, width))
    return np.asarray(img / img.std())


def _grey(base: float, *layers: Array) -> Array:
    return np.repeat((base + np.sum(layers, axis=0))[..., None], 3, -1)


def _facade(rng: np.random.Generator, kind: int) -> Array:
    """Four bays by four storeys of windows in a light wall that takes the building's own colour."""
    n, cell = 128, 32
    img = _grey(0.93, 0.025 * _noise(rng, n, 16))
    for row in range(4):
        for col in range(4):
            y, x = row * cell, col * cell
            glass = np.array([0.34, 0.42, 0.52]) * rng.uniform(0.8, 1.15)
            if rng.random() < 0.12:
                glass = np.array([0.95, 0.84, 0.58])
            w = (7, 3, 9, 1)[kind]
            h = (8, 9, 6, 10)[kind]
            img[y + h : y + cell - 6, x + w : x + cell - w] = glass
            img[y + cell - 9 : y + cell - 6, x + w : x + cell - w] *= 0.8  # lintel shade at the top of the pane
            if kind == 0:
                img[y + h : y + cell - 6, x + cell // 2 - 1 : x + cell // 2 + 1] = 0.95
            if kind == 2:
                img[y + h - 2 : y + h, x + w - 2 : x + cell - w + 2] = 0.75
        if kind in (1, 3):
            img[row * cell : row * cell + 3] *= 0.82
    return img


def _shop(rng: np.random.Generator) -> Array:
    """A ground floor: doors, shop windows and awnings, four bays wide."""
    img = np.full((64, 128, 3), 0.85)
    for bay in range(4):
        x = bay * 32
        img[6:40, x + 3 : x + 29] = np.array([0.28, 0.33, 0.38]) * rng.uniform(0.8, 1.4)
        img[44:56, x + 2 : x + 30] = ((0.75, 0.3, 0.25), (0.3, 0.5, 0.36), (0.86, 0.74, 0.45), (0.32, 0.42, 0.62))[bay]
        if bay % 2:
            img[0:38, x + 12 : x + 20] = (0.42, 0.3, 0.22)
    return img


@cache
def textures() -> dict[str, Array]:
    """Every texture of the world by name; row 0 is the top of the image."""
    rng = np.random.default_rng(20260401)
    out: dict[str, Array] = {
        "asphalt": _grey(0.93, 0.035 * _noise(rng, 64, 8), 0.03 * _noise(rng, 64, 32)),
        "grass": _grey(0.9, 0.07 * _noise(rng, 64, 8), 0.06 * _noise(rng, 64, 24)),
    }
    paving = _grey(0.93, 0.03 * _noise(rng, 64, 16))
    paving[::16] *= 0.86
    paving[:, ::16] *= 0.86
    out["paving"] = paving
    for kind in range(4):
        out[f"facade{kind}"] = _facade(rng, kind)[::-1]
    out["shop"] = _shop(rng)[::-1]
    sky = np.clip(0.7 * _spectral(rng, 64, 256) - 0.05, 0, 1)
    fade = np.interp(np.arange(64), [0, 20, 50, 63], [0.0, 0.42, 0.42, 0.0])[:, None]
    out["sky"] = _grey(0.0, sky * fade)
    return {name: (np.clip(img, 0, 1) * 255 + 0.5).astype(np.uint8) for name, img in out.items()}
