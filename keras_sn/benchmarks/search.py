"""The search behind `depth`: which networks, how deep, and every point that was measured on the way."""

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any

from rich.progress import Progress

from keras_sn.benchmarks import measure, networks
from keras_sn.benchmarks.engines import PLAIN
from keras_sn.benchmarks.measure import Configuration, Row
from keras_sn.errors import KerasSNError
from keras_sn.sizes import format_bytes

SECONDS_PER_POINT = 1800
"""A network that has not made its steps by then does not train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The family of networks, and where its search begins and ends."""

    blocks: tuple[int, int, int]
    """Of stages 1, 2 and 4; stage 3 grows."""
    image_size: int
    classes: int
    width: int
    batch_size: int
    memory: str
    first_n3: int
    max_depth: int
    engines: tuple[str, ...]
    jobs: int
    """Engines that are searched at the same time."""

    def all_blocks(self, n3: int) -> tuple[int, int, int, int]:
        return self.blocks[0], self.blocks[1], n3, self.blocks[2]

    def depth(self, n3: int) -> int:
        return networks.depth(self.all_blocks(n3))

    def arguments(self, n3: int) -> dict[str, Any]:
        """Of `networks.resnet`."""
        sizes = {"image_size": self.image_size, "width": self.width, "classes": self.classes}
        return {"blocks": self.all_blocks(n3)} | sizes

    def largest_n3(self, max_depth: int) -> int:
        return (max_depth - self.depth(0)) // 3


FULL = Setting(
    blocks=(6, 32, 6),
    image_size=224,
    classes=1000,
    width=64,
    batch_size=16,
    memory="12GiB",
    first_n3=128,
    max_depth=4000,
    engines=("keras-graph", "keras-xla", "recompute-xla", "offload-xla", "superneurons-xla"),
    jobs=1,
)
# Few channels and many pixels, so that activations and not gradients fill the memory; the host is the device, so that
# nothing is gained by offloading.
SMALL = Setting(
    blocks=(1, 1, 1),
    image_size=128,
    classes=10,
    width=8,
    batch_size=32,
    memory="80MiB",
    first_n3=8,
    max_depth=302,
    engines=("keras-graph", "keras-xla", "recompute", "recompute-xla"),
    jobs=2,
)


def find_deepest(trains: Callable[[int], bool], *, first: int, largest: int, is_close: Callable[[int, int], bool]) -> int:
    """Finds the largest number that `trains`, by doubling and then by halving the gap.

    Args:
        trains: Whether a network with so many blocks trains; true up to some number and false from there on.
        first: Where to start, at least 1.
        largest: Where to stop.
        is_close: Whether the gap between a number that trains and a larger one that does not is small enough.

    Returns:
        The largest number found to train; 0 if none does.
    """
    deepest, too_deep, n = 0, None, min(first, largest)
    while True:
        if trains(n):
            deepest = n
        else:
            too_deep = n
        if too_deep is None:
            if deepest == largest:
                return deepest
            n = 2 * deepest
            if n >= largest or is_close(n, largest):
                n = largest
        elif too_deep - deepest <= 1 or (deepest and is_close(deepest, too_deep)):
            return deepest
        else:
            n = (deepest + too_deep) // 2


class Search:
    """The searches of one run, engine by engine, and the points that they measure."""

    def __init__(self, setting: Setting, options: argparse.Namespace, run: Callable[..., Row] = measure.run):
        self.setting, self.options, self.run = setting, options, run
        self.points: list[Row] = []
        self.on_point: Callable[[], None] = lambda: None
        """Called after every point, never twice at a time."""
        self._lock = Lock()
        self.deepest: dict[str, int] = {}
        """Engine -> the largest n3 that trains."""
        self.failures: dict[str, str] = {}

    def search_all(self, progress: Progress) -> None:
        """Plain Keras first; the others then start at twice what it reached."""
        plain = [engine for engine in self.options.engines if engine in PLAIN]
        others = [engine for engine in self.options.engines if engine not in plain]
        with ThreadPoolExecutor(self.options.jobs) as pool:
            for engines in (plain, others):
                first = max([self.setting.first_n3, *(2 * n3 for n3 in self.deepest.values())])
                list(pool.map(lambda engine, first=first: self._search(engine, first, progress), engines))

    def _search(self, engine: str, first: int, progress: Progress) -> None:
        task = progress.add_task(engine, total=None, status="")
        setting = self.setting

        def trains(n3: int) -> bool:
            progress.update(task, status=f"depth {setting.depth(n3)} …")
            point = self.run(self._configuration(engine, n3), SECONDS_PER_POINT)
            progress.console.print(_describe(point), highlight=False, markup=False)
            with self._lock:
                self.points.append(point)
                self.on_point()
            if point["fits"] is None:
                raise KerasSNError(point["reason"])
            return point["fits"]

        def is_close(deepest: int, too_deep: int) -> bool:
            return 3 * (too_deep - deepest) <= self.options.tolerance * setting.depth(deepest)

        largest = setting.largest_n3(self.options.max_depth)
        try:
            self.deepest[engine] = find_deepest(trains, first=first, largest=largest, is_close=is_close)
        except KerasSNError as error:
            self.failures[engine] = str(error)
        progress.update(task, total=1, completed=1, status=self.verdict(engine))

    def _configuration(self, engine: str, n3: int) -> Configuration:
        return Configuration(
            engine=engine,
            network="resnet",
            arguments=self.setting.arguments(n3),
            batch_size=self.options.batch,
            dtype=self.options.dtype,
            memory_bytes=self.options.memory_bytes,
        )

    def verdict(self, engine: str) -> str:
        """The deepest network of an engine, in words."""
        if engine in self.failures:
            return "failed"
        n3 = self.deepest.get(engine, 0)
        if not n3:
            return f"not even {self.setting.depth(1)}"
        is_end = n3 == self.setting.largest_n3(self.options.max_depth)
        return f"{'at least ' if is_end else ''}{self.setting.depth(n3)}"

    def deepest_point(self, engine: str) -> Row | None:
        depth = self.setting.depth(self.deepest.get(engine, 0))
        return next((p for p in self.points if p["engine"] == engine and p["depth"] == depth and p["fits"]), None)


def _describe(point: Row) -> str:
    name = f"{point['engine']:>16}  depth {point['depth']:>5}: "
    is_measured = point["peak_bytes"] is not None
    peak = format_bytes(point["peak_bytes"]) if is_measured else point["reason"].splitlines()[-1]
    return name + ("failed: " if point["fits"] is None else "trains, " if point["fits"] else "too deep, ") + peak
