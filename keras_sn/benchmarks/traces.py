"""What a device did while training steps ran: seconds by kernel, copies, and how far the two overlap.

TensorFlow's profiler writes an `XSpace`: a plane for each device, in it a line for each stream, in it the kernels and copies with
their times. In: a function that runs the steps. Out: a `Trace`.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2  # no public name reads what the profiler writes

COPIES = {"MemcpyD2H": "to_host", "MemcpyH2D": "to_device"}
_PICOSECONDS = 1e-12

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Trace:
    """Of all traced steps together, in seconds and bytes."""

    span_seconds: float
    """From the first kernel to the end of the last."""
    busy_seconds: float
    """In which at least one kernel ran."""
    kernel_seconds: dict[str, float]
    """By name, the longest first."""
    copy_seconds: dict[str, float]
    """`"to_host"` and `"to_device"`: in which at least one such copy ran."""
    copied_bytes: dict[str, int]
    hidden_seconds: dict[str, float]
    """Of `copy_seconds`, while a kernel ran too."""

    def row(self, kernels: int = 25) -> dict[str, Any]:
        """As a benchmark row has it, with so many of the kernels."""
        return asdict(self) | {"kernel_seconds": dict(list(self.kernel_seconds.items())[:kernels])}


def trace(run: Callable[[], object]) -> Trace | None:
    """Runs a function under TensorFlow's profiler; None where no device was seen, as without a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        run()
        tf.profiler.experimental.stop()
        spaces = [xplane_pb2.XSpace.FromString(path.read_bytes()) for path in Path(folder).rglob("*.xplane.pb")]
    planes = [plane for space in spaces for plane in space.planes if plane.name.startswith("/device:GPU")]
    return of_plane(planes[0]) if planes else None


def of_plane(plane: Any) -> Trace:
    """The trace of one device."""
    kernels: list[Interval] = []
    by_name: Counter[str] = Counter()
    copies: dict[str, list[Interval]] = {kind: [] for kind in COPIES.values()}
    copied = dict.fromkeys(copies, 0)
    for name, interval, stats in _events(plane):
        if kind := next((kind for prefix, kind in COPIES.items() if name.startswith(prefix)), None):
            copies[kind].append(interval)
            copied[kind] += _bytes(stats)
        elif not name.startswith(("Memcpy", "Memset")):
            kernels.append(interval)
            by_name[name] += interval[1] - interval[0]
    busy = union(kernels)
    return Trace(
        span_seconds=busy[-1][1] - busy[0][0] if busy else 0.0,
        busy_seconds=length(busy),
        kernel_seconds=dict(by_name.most_common()),
        copy_seconds={kind: length(union(intervals)) for kind, intervals in copies.items()},
        copied_bytes=copied,
        hidden_seconds={kind: length(overlap(union(intervals), busy)) for kind, intervals in copies.items()},
    )


def _events(plane: Any) -> Iterator[tuple[str, Interval, dict[str, Any]]]:
    """Kernels and copies of the streams; the profiler adds lines of its own that repeat them by module or step."""
    for line in plane.lines:
        if not line.name.startswith("Stream"):
            continue
        for event in line.events:
            start = line.timestamp_ns * 1e-9 + event.offset_ps * _PICOSECONDS
            stats = {plane.stat_metadata[one.metadata_id].name: _value(plane, one) for one in event.stats}
            yield plane.event_metadata[event.metadata_id].name, (start, start + event.duration_ps * _PICOSECONDS), stats


def _value(plane: Any, stat: Any) -> Any:
    kind = stat.WhichOneof("value")
    value = getattr(stat, kind) if kind else None
    return plane.stat_metadata[value].name if kind == "ref_value" else value


def _bytes(stats: dict[str, Any]) -> int:
    """Of a copy: its details read `kind_src:pinned kind_dst:device size:4096 …`."""
    details = dict(word.partition(":")[::2] for word in str(stats.get("memcpy_details", "")).split())
    return int(details.get("size", 0))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments in intervals that do not touch, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def overlap(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The moments in both of two unions."""
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Iterable[Interval]) -> float:
    """The sum of the intervals' lengths."""
    return sum(end - start for start, end in intervals)
