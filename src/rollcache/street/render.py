"""The renderer: draws an episode with the seven-camera rig, headless on the CPU, with panda3d's software display.

Frames are drawn `supersample` times larger and averaged, since hard edges cost a codec dearly. The display has no fog,
so haze is made of translucent cylinders around the ego, which all seven cameras share.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from rollcache.street.ego import CAMERA_HEIGHT
from rollcache.street.rig import RIG, ViewGroup
from rollcache.street.scene import Episode, view_distance
from rollcache.street.scene_mesh import DETAIL, GROUND, MARK, SOLID, Batch, Colour, Mesh, rng_of
from rollcache.street.scene_objects import agent_mesh
from rollcache.street.scene_textures import textures

if TYPE_CHECKING:
    from types import TracebackType

Array = np.ndarray
TILE = 40.0  # metres; the unit of culling
DETAIL_DISTANCE = 55.0  # metres
HAZE: tuple[tuple[float, float], ...] = (
    (0.26, 0.10),
    (0.39, 0.14),
    (0.53, 0.18),
    (0.67, 0.24),
    (0.80, 0.34),
    (0.92, 0.5),
)  # radius as a share of the view, opacity
SKIES: tuple[tuple[Colour, Colour], ...] = (  # zenith, horizon
    ((0.36, 0.58, 0.86), (0.80, 0.87, 0.92)),
    ((0.46, 0.62, 0.80), (0.87, 0.87, 0.84)),
    ((0.55, 0.64, 0.74), (0.84, 0.86, 0.88)),
    ((0.40, 0.56, 0.82), (0.92, 0.85, 0.76)),
)


def _panda() -> Any:
    try:
        import panda3d.core  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError('drawing the street world needs panda3d: pip install "rollcache[street]"') from error
    return panda3d.core


class Renderer:
    """Draws episodes. One renderer serves any number of them, one after the other; use it as a context manager.

    Args:
        supersample: samples per pixel and axis.

    Raises:
        ImportError: panda3d is not installed.
        RuntimeError: panda3d's software display is not to be had.
    """

    def __init__(self, supersample: int = 2) -> None:
        self.p: Any = _panda()
        self.scale = supersample
        p = self.p
        p.loadPrcFileData("", "notify-level-display error\nnotify-level-tinydisplay error\naudio-library-name null\n")
        self.engine = p.GraphicsEngine()
        self.pipe = p.GraphicsPipeSelection.getGlobalPtr().makePipe("TinyOffscreenGraphicsPipe", "p3tinydisplay")
        if self.pipe is None:
            raise RuntimeError("panda3d has no software display (p3tinydisplay) here; reinstall panda3d")
        self.root = p.NodePath("rig")
        self.rig = self.root.attachNewNode("ego")
        self.textures = {name: self._texture(name, image) for name, image in textures().items()}
        self.buffers: list[Any] = []
        self.images: list[tuple[ViewGroup, Any]] = []
        for group in RIG:
            self._open(group)
        self.agents: dict[tuple[str, Colour], Any] = {}
        self.episode: Episode | None = None
        self.static: Any = None
        self.halo: Any = None  # what is centred on the ego: sky, hills, far ground, haze
        self.shown: list[tuple[Any, Any]] = []  # tiles and the details in them
        self.extent: Array = np.zeros((0, 4))  # their x0, x1, y0, y1
        self.live: dict[int, Any] = {}

    def __enter__(self) -> Renderer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the buffers back; the renderer cannot draw any more."""
        self._clear()
        for buffer in self.buffers:
            self.engine.removeWindow(buffer)
        self.buffers = []

    # -- set-up -----------------------------------------------------------------------------------------------------

    def _texture(self, name: str, image: Array) -> Any:
        p = self.p
        tex = p.Texture(name)
        tex.setup2dTexture(image.shape[1], image.shape[0], p.Texture.TUnsignedByte, p.Texture.FRgb)
        tex.setRamImage(np.ascontiguousarray(image[::-1, :, ::-1]).tobytes())
        tex.setMinfilter(p.SamplerState.FTLinearMipmapNearest)
        tex.setMagfilter(p.SamplerState.FTLinear)
        tex.setWrapU(p.SamplerState.WMRepeat)
        tex.setWrapV(p.SamplerState.WMRepeat)
        return tex

    def _open(self, group: ViewGroup) -> None:
        """One buffer a view group, its cameras stacked from top to bottom."""
        p, views = self.p, len(group.cameras)
        height, width = group.height * self.scale, group.width * self.scale
        props = p.FrameBufferProperties()
        props.setRgbColor(True)
        props.setDepthBits(24)
        gsg = self.buffers[0].getGsg() if self.buffers else None
        size = p.WindowProperties.size(width, height * views)
        args = (self.pipe, group.name, 0, props, size, p.GraphicsPipe.BFRefuseWindow)
        buffer = self.engine.makeOutput(*args, gsg) if gsg is not None else self.engine.makeOutput(*args)
        if buffer is None:
            raise RuntimeError(f"panda3d opened no {width}x{height * views} buffer for view group {group.name}")
        image = p.Texture(group.name)
        buffer.addRenderTexture(image, p.GraphicsOutput.RTMCopyRam, p.GraphicsOutput.RTPColor)
        for i, camera in enumerate(group.cameras):
            lens = p.PerspectiveLens()
            rise = math.degrees(2 * math.atan(math.tan(math.radians(camera.fov / 2)) * group.height / group.width))
            lens.setFov(camera.fov, rise)
            lens.setNearFar(0.35, 400.0)
            node = self.rig.attachNewNode(p.Camera(camera.name, lens))
            node.setH(camera.yaw)
            region = buffer.makeDisplayRegion(0.0, 1.0, 1.0 - (i + 1) / views, 1.0 - i / views)
            region.setCamera(node)
        self.buffers.append(buffer)
        self.images.append((group, image))

    def _geoms(self, name: str, batches: dict[tuple[int, str], Batch]) -> dict[int, Any]:
        """Panda nodes by draw layer."""
        p = self.p
        nodes: dict[int, Any] = {}
        for (layer, texture), batch in batches.items():
            n = len(batch.corners) * 4
            data = p.GeomVertexData(name, p.GeomVertexFormat.getV3c4t2(), p.Geom.UHStatic)
            data.uncleanSetNumRows(n)
            rows = np.empty(n, [("xyz", "<f4", 3), ("rgba", "u1", 4), ("uv", "<f4", 2)])
            rows["xyz"], rows["uv"] = batch.corners.reshape(n, 3), batch.uv.reshape(n, 2)
            rows["rgba"][:, 3] = 255
            rows["rgba"][:, : batch.colour.shape[-1]] = batch.colour.reshape(n, -1) * 255 + 0.5
            memoryview(data.modifyArray(0)).cast("B")[:] = rows.tobytes()
            index = (np.arange(0, n, 4, dtype=np.uint32)[:, None] + np.array([0, 1, 2, 0, 2, 3], np.uint32)).astype(
                "<u4"
            )
            triangles = p.GeomTriangles(p.Geom.UHStatic)
            triangles.setIndexType(p.Geom.NTUint32)
            array = triangles.modifyVertices()
            array.uncleanSetNumRows(index.size)
            memoryview(array).cast("B")[:] = index.tobytes()
            geom = p.Geom(data)
            geom.addPrimitive(triangles)
            node = nodes.setdefault(layer, p.GeomNode(f"layer{layer}"))
            state = p.RenderState.makeEmpty()
            if texture:
                state = state.addAttrib(p.TextureAttrib.make(self.textures[texture]))
            node.addGeom(geom, state)
        return nodes

    def _attach(self, parent: Any, name: str, batches: dict[tuple[int, str], Batch]) -> Any:
        """A node with the layers of a mesh under `parent`, each drawn in its turn."""
        top = parent.attachNewNode(name)
        for layer, node in self._geoms(name, batches).items():
            path = top.attachNewNode(node)
            if layer in (GROUND, MARK):
                path.setBin("background", 10 + layer)
                path.setDepthTest(False)
                path.setDepthWrite(False)
                if layer == GROUND:
                    path.setTwoSided(True)
            else:
                path.setBin(
                    "fixed", 0
                )  # in the order of the scene graph: the usual sorting by state varies from run to run
        return top

    # -- an episode -------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        if self.static is not None:
            self.static.removeNode()
        self.episode, self.static, self.shown, self.live = None, None, [], {}

    def _load(self, episode: Episode) -> None:
        self._clear()
        self.static = self.root.attachNewNode("episode")
        extent: list[tuple[float, ...]] = []
        for chunk in episode.chunks:
            for tile, batches in chunk.mesh.tiles(TILE).items():
                path = self._attach(self.static, f"tile{tile}", batches)
                corners = np.concatenate([b.corners[..., :2].reshape(-1, 2) for b in batches.values()])
                box = (corners[:, 0].min(), corners[:, 0].max(), corners[:, 1].min(), corners[:, 1].max())
                self.shown.append((path, path.find(f"**/layer{DETAIL}")))
                extent.append(box)
        self.extent = np.array(extent)
        zenith, horizon = SKIES[int(rng_of(episode.seed, 61).integers(len(SKIES)))]
        self._surroundings(episode, zenith, horizon)
        self.episode = episode

    def _surroundings(self, episode: Episode, zenith: Colour, horizon: Colour) -> None:
        """Sky, hills, far ground and haze: all centred on the ego, none of it turning with it."""
        p, rng = self.p, rng_of(episode.seed, 62)
        self.halo = self.static.attachNewNode("halo")
        angle = np.linspace(0, 2 * math.pi, 49)
        mesh = Mesh()
        bands = ((-4.0, 0.0), (6.0, 0.0), (20.0, 0.22), (45.0, 0.55), (90.0, 0.85), (240.0, 1.0))
        mix = np.asarray(zenith) - np.asarray(horizon)
        for (z0, f0), (z1, f1) in pairwise(bands):
            mesh.quads(
                GROUND,
                _ring(angle, 150.0, np.full(49, z0), np.full(49, z1)),
                _shades(np.asarray(horizon) + mix * f0, np.asarray(horizon) + mix * f1, 48),
            )
        sky = self._attach(self.halo, "sky", mesh.merged())
        sky.setBin("background", 0, 1)
        clouds = Mesh()
        uv = np.stack(
            [
                np.stack([angle[1:], angle[:-1], angle[:-1], angle[1:]], -1) / math.pi,
                np.tile([0.0, 0.0, 1.0, 1.0], (48, 1)),
            ],
            -1,
        )
        clouds.quads(
            GROUND,
            _ring(angle + float(rng.uniform(0, 6)), 149.0, np.full(49, 8.0), np.full(49, 110.0)),
            (1.0, 1.0, 1.0),
            "sky",
            uv,
        )
        path = self._attach(self.halo, "clouds", clouds.merged())
        path.setAttrib(
            p.ColorBlendAttrib.make(p.ColorBlendAttrib.MAdd, p.ColorBlendAttrib.OOne, p.ColorBlendAttrib.OOne)
        )
        path.setBin("background", 1, 1)
        hills = Mesh()
        steps = np.linspace(0, 2 * math.pi, 97)
        city = episode.scenario != "highway"
        for radius, blend, amount in ((148.0, 0.72, 9.0), (147.0, 0.55, 5.5)):
            wave = sum(
                float(rng.uniform(0.3, 1.0)) / k * np.sin(k * steps + float(rng.uniform(0, 6)))
                for k in (2, 3, 5, 8, 13)
            )
            top = np.maximum(amount * (0.55 + 0.4 * wave), 0.6)
            tone = (
                np.asarray((0.52, 0.56, 0.62) if city else (0.38, 0.52, 0.42)) * (1 - blend)
                + np.asarray(horizon) * blend
            )
            hills.quads(GROUND, _ring(steps, radius, np.full(97, -3.0), top), tuple(tone))
        self._attach(self.halo, "hills", hills.merged()).setBin("background", 2, 1)
        plain = Mesh()
        far = np.array([[[-400, -400, 0], [400, -400, 0], [400, 400, 0], [-400, 400, 0]]])
        plain.quads(GROUND, far, (0.50, 0.57, 0.44) if not city else (0.52, 0.53, 0.52))
        self._attach(self.halo, "plain", plain.merged()).setBin("background", 3, 1)
        self._haze(horizon, view_distance(episode.scenario))

    def _haze(self, horizon: Colour, reach: float) -> None:
        p = self.p
        angle = np.linspace(0, 2 * math.pi, 25)
        for share, opacity in HAZE:
            radius = share * reach
            levels = ((0.0, 1.0), (0.08, 1.0), (0.36, 0.0))  # height as a share of the radius, density
            batches = [
                Batch(
                    _ring(angle, radius, np.full(25, z0 * radius), np.full(25, z1 * radius)),
                    np.zeros((24, 4, 2)),
                    _shades(np.array([*horizon, a0 * opacity]), np.array([*horizon, a1 * opacity]), 24),
                )
                for (z0, a0), (z1, a1) in pairwise(levels)
            ]
            whole = Batch(*(np.concatenate([getattr(b, f) for b in batches]) for f in ("corners", "uv", "colour")))
            path = self._attach(self.halo, "haze", {(SOLID, ""): whole})
            path.setTransparency(p.TransparencyAttrib.MAlpha)
            path.setDepthWrite(False)
            path.setTwoSided(True)
            path.setBin("fixed", 10, 1)

    def _pose(self, episode: Episode, i: int) -> None:
        """Put the rig, the chunks and the agents where they are in frame i."""
        x, y, yaw = (float(v) for v in episode.poses[i])
        self.rig.setPosHpr(x, y, CAMERA_HEIGHT, math.degrees(yaw) - 90.0, 0.0, 0.0)
        self.halo.setPos(x, y, 0.0)
        reach = view_distance(episode.scenario)
        gap = np.hypot(*np.maximum(np.maximum(self.extent[:, ::2] - (x, y), (x, y) - self.extent[:, 1::2]), 0.0).T)
        for (path, detail), distance in zip(self.shown, gap, strict=True):
            path.hide() if distance > reach else path.show()
            if not detail.isEmpty():
                detail.hide() if distance > DETAIL_DISTANCE else detail.show()
        present = set()
        for box in episode.boxes[i][: episode.moving[i]]:
            present.add(box.agent)
            if box.agent not in self.live:
                key = (box.kind, box.colour)
                if key not in self.agents:
                    self.agents[key] = self._attach(self.p.NodePath("pool"), box.kind, agent_mesh(*key).merged())
                self.live[box.agent] = self.agents[key].copyTo(self.static, box.agent)
            self.live[box.agent].setPosHpr(box.centre[0], box.centre[1], 0.0, math.degrees(box.yaw), 0.0, 0.0)
        for agent in [a for a in self.live if a not in present]:
            self.live.pop(agent).removeNode()

    def frames(self, episode: Episode, start: int = 0, stop: int | None = None) -> dict[str, Array]:
        """Frames start..stop-1 of an episode: view group name -> uint8 [T, V, H, W, 3], cameras in rig order.

        Raises:
            ValueError: the range does not lie within the episode.
        """
        stop = len(episode) if stop is None else stop
        if not 0 <= start < stop <= len(episode):
            raise ValueError(f"frames {start} to {stop} do not lie within the episode's {len(episode)} frames")
        if not self.buffers:
            raise ValueError("this renderer is closed; make a new one")
        if self.episode is not episode:
            self._load(episode)
        out = {g.name: np.empty((stop - start, len(g.cameras), g.height, g.width, 3), np.uint8) for g in RIG}
        for t in range(start, stop):
            self._pose(episode, t)
            self.engine.renderFrame()
            for group, image in self.images:
                out[group.name][t - start] = self._read(group, image)
        return out

    def _read(self, group: ViewGroup, image: Any) -> Array:
        """The averaged pictures of one buffer, uint8 [V, H, W, 3]."""
        n, views = self.scale, len(group.cameras)
        raw = np.frombuffer(memoryview(image.getRamImage()), np.uint8).reshape(
            views * group.height * n, group.width * n, 4
        )[::-1]
        rows = raw[0::n].astype(np.uint16)
        for k in range(1, n):
            rows += raw[k::n]
        total = rows[:, 0::n].copy()
        for k in range(1, n):
            total += rows[:, k::n]
        mean = (total + n * n // 2) // (n * n)  # [V*H, W, 4], blue first
        return mean[..., 2::-1].astype(np.uint8).reshape(views, group.height, group.width, 3)


def _ring(angle: Array, radius: float, low: Array, high: Array) -> Array:
    """Quads [N-1, 4, 3] of a cylinder seen from inside, between heights low and high [N]."""
    x, y = radius * np.cos(angle), radius * np.sin(angle)
    a, b = np.stack([x, y, low], -1), np.stack([x, y, high], -1)
    return np.stack([a[1:], a[:-1], b[:-1], b[1:]], 1)


def _shades(low: Array, high: Array, n: int) -> Array:
    """Corner colours [n, 4, C] of a ring: `low` at its foot, `high` at its top."""
    return np.broadcast_to(np.stack([low, low, high, high]), (n, 4, low.size))
