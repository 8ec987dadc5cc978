"""`python site/figures.py [DIRECTORY]`: draws the pictures of the documentation as SVG, for light and dark.

A picture is boxes at given places with arrows between them, or plots of committed results; nothing is laid
out by itself. They are images with a style of their own, so that GitHub and the site show the same.
"""

# Lines of SVG and CSS are as long as they are.
# ruff: noqa: E501

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from plots import Plot, Scale

RESULTS = Path(__file__).parents[1] / "benchmarks/results"

_STYLE = """
  .box { fill: #fff; stroke: #5b6b7c } .group { fill: #eef2f6; stroke: #c3ccd6 } .store { fill: #e6f3ee; stroke: #2d8a63 }
  .key { fill: #e5effb; stroke: #1264c4 } .line { stroke: #5b6b7c; fill: none } .head { fill: #5b6b7c }
  .ink { fill: #16202c } .soft { fill: #56616e } .halo { stroke: #fff } .guided { fill: #1264c4 } .rtn { fill: #cf5a10 }
  .guided-line { stroke: #1264c4 } .rtn-line { stroke: #cf5a10 } .copy { fill: #2d8a63 } .copy-line { stroke: #2d8a63 }
  .pack { fill: #7a4bc2 } .pack-line { stroke: #7a4bc2 }
  @media (prefers-color-scheme: dark) {
    .box { fill: #1b232d; stroke: #8494a6 } .group { fill: #232d38; stroke: #4a5867 } .store { fill: #17352a; stroke: #5fc692 }
    .key { fill: #17304d; stroke: #63a8f7 } .line { stroke: #93a1b1 } .head { fill: #93a1b1 }
    .ink { fill: #e7ecf2 } .soft { fill: #a9b5c2 } .halo { stroke: #1e2129 } .guided { fill: #63a8f7 } .rtn { fill: #f39a57 }
    .guided-line { stroke: #63a8f7 } .rtn-line { stroke: #f39a57 } .copy { fill: #5fc692 } .copy-line { stroke: #5fc692 }
    .pack { fill: #b391f2 } .pack-line { stroke: #b391f2 }
  }
  text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; text-anchor: middle }
  .small { font-size: 12px } .halo { paint-order: stroke; stroke-width: 5px; stroke-linejoin: round } .left { text-anchor: start } .end { text-anchor: end }
"""


@dataclass(frozen=True)
class Box:
    """A rectangle with lines of text: left, top, width and height. `kind` is box, group, store or key."""

    at: tuple[int, int, int, int]
    text: str
    kind: str = "box"

    @property
    def centre(self) -> tuple[float, float]:
        """The middle."""
        left, top, width, height = self.at
        return left + width / 2, top + height / 2

    def svg(self) -> str:
        """The rectangle; a group has its text at the top."""
        left, top, width, height = self.at
        lines = self.text.split("\n")
        x, y = self.centre
        first = top + 18 if self.kind == "group" else y - (len(lines) - 1) * 8.5 + 4.5
        parts = [
            f'<rect class="{self.kind}" x="{left}" y="{top}" width="{width}" height="{height}" rx="7"/>',
            *(
                f'<text class="{"ink" if not number else "soft small"}" x="{x:g}" y="{first + 17 * number:g}">'
                f"{escape(line)}</text>"
                for number, line in enumerate(lines)
            ),
        ]
        return "\n".join(parts)

    def border(self, towards: tuple[float, float]) -> tuple[float, float]:
        """Where a line from the middle towards a point leaves the rectangle."""
        (x, y), (_, _, width, height) = self.centre, self.at
        dx, dy = towards[0] - x, towards[1] - y
        scale = min((width / 2) / abs(dx) if dx else 9e9, (height / 2) / abs(dy) if dy else 9e9)
        return x + dx * scale, y + dy * scale


@dataclass(frozen=True)
class Arrow:
    """From a box to another, by their names, with words in a gap of the line.

    `shift` moves it sideways, so that two between the same boxes do not meet; `along` is where the words are.
    """

    start: str
    end: str
    words: str = ""
    shift: tuple[int, int] = (0, 0)
    along: float = 0.5
    dashed: bool = False

    def svg(self, boxes: dict[str, Box]) -> str:
        """The line with its head, and the words."""
        here, there = boxes[self.start], boxes[self.end]
        (x1, y1), (x2, y2) = here.border(there.centre), there.border(here.centre)
        x1, y1 = x1 + self.shift[0], y1 + self.shift[1]
        dx, dy = x2 + self.shift[0] - x1, y2 + self.shift[1] - y1
        lines = self.words.split("\n") if self.words else []
        path = f"M{x1:.1f} {y1:.1f}"
        parts = []
        if lines:
            # A letter of this size is 6.6 wide on average, a line 15 high.
            width, height = 3.3 * max(map(len, lines)) + 5, 7.5 * len(lines) + 2
            gap = min(width / abs(dx) if dx else 9e9, height / abs(dy) if dy else 9e9)
            before, after = self.along - gap, self.along + gap
            path += (
                f"L{x1 + dx * before:.1f} {y1 + dy * before:.1f}M{x1 + dx * after:.1f} {y1 + dy * after:.1f}"
            )
            x, first = x1 + dx * self.along, y1 + dy * self.along + 11.5 - 7.5 * len(lines)
            parts = [
                f'<text class="soft small" x="{x:.1f}" y="{first + 15 * number:.1f}">{escape(line)}</text>'
                for number, line in enumerate(lines)
            ]
        dash = ' stroke-dasharray="5 4"' if self.dashed else ""
        end = f"L{x1 + dx:.1f} {y1 + dy:.1f}"
        return "\n".join([f'<path class="line" d="{path}{end}" marker-end="url(#head)"{dash}/>', *parts])


@dataclass(frozen=True)
class Figure:
    """A picture: its size, what it shows in words, boxes from back to front, arrows, and SVG as it stands."""

    size: tuple[int, int]
    title: str
    boxes: dict[str, Box]
    arrows: tuple[Arrow, ...] = ()
    more: tuple[str, ...] = field(default=())

    def svg(self) -> str:
        """The file."""
        width, height = self.size
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
                f'height="{height}" role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{_STYLE}</style>",
                '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
                'orient="auto-start-reverse"><path class="head" d="M0 0L8 4L0 8z"/></marker></defs>',
                *(box.svg() for box in self.boxes.values()),
                *(arrow.svg(self.boxes) for arrow in self.arrows),
                *self.more,
                "</svg>\n",
            ]
        )


def _rounding() -> Figure:
    """The magnitudes of FP4 on a line, and a value that lies on both sides of a midpoint."""
    grid = (0, 0.5, 1, 1.5, 2, 3, 4, 6)

    def x(value: float) -> float:
        return 40 + value * 118

    middle = 190
    parts = [f'<path class="line" d="M{x(0)} {middle}H{x(6) + 12}" stroke-width="1.5"/>']
    for code, value in enumerate(grid):
        parts += [
            f'<path class="line" d="M{x(value):g} {middle - 8}V{middle + 8}" stroke-width="1.5"/>',
            f'<text class="ink" x="{x(value):g}" y="{middle + 26}">{value:g}</text>',
            f'<text class="soft small" x="{x(value):g}" y="{middle + 44}">…{code & 1}</text>',
        ]
    parts.append(
        f'<text class="soft small left" x="{x(0)}" y="{middle + 66}">below each magnitude: the low bit of its code,'
        " which is what the record keeps</text>"
    )
    half = x(2.5)
    parts += [
        f'<path class="line" d="M{half} {middle - 84}V{middle + 14}" stroke-dasharray="4 4"/>',
        f'<text class="soft small" x="{half}" y="{middle + 27}">midpoint 2.5</text>',
    ]
    rollout, trainer = 2.42, 2.58  # further apart than the page has them, so that they can be seen
    parts += [
        f'<circle class="guided" cx="{x(rollout):.1f}" cy="{middle}" r="5.5"/>',
        f'<path class="guided-line" d="M{x(rollout):.1f} {middle - 7}V{middle - 126}" fill="none"/>',
        f'<text class="guided" x="{x(rollout) - 96:.1f}" y="{middle - 132}">rollout: 2.49, rounds to 2, bit 0</text>',
        f'<circle class="rtn" cx="{x(trainer):.1f}" cy="{middle}" r="5.5"/>',
        f'<path class="rtn-line" d="M{x(trainer):.1f} {middle - 7}V{middle - 126}" fill="none"/>',
        f'<text class="rtn left" x="{x(trainer) - 4:.1f}" y="{middle - 132}">trainer: 2.51, of the same token</text>',
    ]
    arrow = 'fill="none" stroke-width="2" marker-end="url(#head)"'
    parts += [
        f'<path class="rtn-line" d="M{x(trainer) + 6:.1f} {middle - 14}Q{x(2.8):.1f} {middle - 36} {x(3) - 3:.1f} {middle - 11}" '
        f"{arrow}/>",
        f'<text class="rtn left" x="{x(2.86):.1f}" y="{middle - 36}">to nearest: 3</text>',
        f'<path class="guided-line" d="M{x(trainer) - 6:.1f} {middle - 14}Q{x(2.3):.1f} {middle - 52} {x(2) + 3:.1f} '
        f'{middle - 11}" {arrow}/>',
        f'<text class="guided" x="{x(1.32):.1f}" y="{middle - 44}">guided by the bit 0: 2, as the rollout</text>',
    ]
    return Figure(
        (790, 270), "One value, rounded by rollout and trainer, to nearest and guided", {}, (), tuple(parts)
    )


_KERNELS = {
    "copy": ("device copy", "copy"),
    "rtnFakeQuantize": ("round to nearest", "rtn"),
    "rtnQuantizePack": ("quantise and pack", "pack"),
    "guidedFakeQuantize1bit": ("guided, 1 bit", "guided"),
}
"""Kernels of benchmarks/gpu that are drawn, with their words and colours."""
_LANES = 128
"""Thread instructions that a multiprocessor of Hopper issues a cycle."""


def _gpu(document: dict[str, Any]) -> Figure:
    """What the kernels reach: bandwidth by size, and where between the roofs of memory and instructions."""
    about, kernels = document["machine"], document["kernels"]
    mib = 2**20
    sizes = kernels["sizes"]
    low, high = sizes[0]["bytes"] / mib, sizes[-1]["bytes"] / mib
    bandwidth = Plot(
        (62, 40, 320, 230),
        "Bytes read and written a second",
        Scale(
            low,
            high,
            tuple((v, f"{v:g}") for v in (1, 4, 16, 64, 256, 1024) if low <= v <= high),
            "BF16 values, MiB",
            log=True,
        ),
        Scale(0, 5, tuple((v, f"{v:g}") for v in range(6)), "TB/s"),
    )
    clock = float(about["clocks.max.sm"].split()[0]) * 1e6
    issue = about["multiprocessors"] * _LANES * clock / 1e12
    memory = about["copyBytesPerSecond"] / 1e12
    ridge = issue / memory
    roof = Plot(
        (482, 40, 320, 230),
        "Instructions a second",
        Scale(
            1,
            32,
            tuple((v, f"{v:g}") for v in (1, 2, 4, 8, 16, 32)),
            "thread instructions a byte moved",
            log=True,
        ),
        Scale(4, 48, tuple((v, f"{v:g}") for v in (4, 8, 16, 32)), "10¹² instructions/s", log=True),
    )
    parts = [*bandwidth.axes(), *roof.axes()]
    parts += roof.line([(1, memory), (ridge, issue), (32, issue)], "copy", dots=False)
    parts.append(roof.word((4, 4 * memory), "memory: a copy", "copy", (-10, 0), "end"))
    parts.append(roof.word((32, issue), "issue: 4 warps a cycle", "copy", (-6, -8), "end"))
    for number, (kernel, (word, kind)) in enumerate(_KERNELS.items()):
        rates = [
            (one["bytes"] / mib, one[kernel]["movedBytes"] / one[kernel]["seconds"] / 1e12) for one in sizes
        ]
        parts += bandwidth.line(rates, kind, dashed=kernel == "copy")
        parts.append(bandwidth.word((high, 0), word, kind, (-8, -66 + 18 * number), "end"))
        counted = kernels["instructions"].get(kernel)
        if counted:
            largest = sizes[-1]
            values, moved = largest["bytes"] / 2, largest[kernel]["movedBytes"]
            done = counted["perValue"] * values
            point = (done / moved, done / largest[kernel]["seconds"] / 1e12)
            parts += roof.line([point], kind)
            counts = f"{word}, {counted['perValue']:.0f} a value"
            parts.append(roof.word((32, 4), counts, kind, (-8, -66 + 18 * number), "end"))
    return Figure(
        (830, 330), f"Kernels on an {about['gpu']}: bandwidth by size, and the roofline", {}, (), tuple(parts)
    )


FIGURES = {
    "how-it-works": Figure(
        (860, 250),
        "Rollout and trainer, and what travels between them",
        {
            "rollout": Box((10, 12, 330, 222), "rollout (FP4)", "group"),
            "trainer": Box((520, 12, 330, 222), "trainer (BF16, FP4 emulated)", "group"),
            "generate": Box((30, 46, 290, 60), "generate\nexperts' input, K and V in NVFP4"),
            "capture": Box((30, 152, 290, 60), "capture\nlow code bits and low scale bits", "key"),
            "loss": Box((540, 46, 290, 60), "GRPO\nimportance ratio from the right forward"),
            "pair": Box((540, 152, 290, 60), "guided rounding\npaired by (trajectory, token, site)", "key"),
        },
        (
            Arrow("generate", "capture"),
            Arrow("capture", "pair", "frames: checked, versioned"),
            Arrow("generate", "loss", "tokens, log-probs, handles", (0, -12)),
            Arrow("loss", "generate", "weights of version n + 1", (0, 14)),
            Arrow("pair", "loss"),
        ),
    ),
    "architecture": Figure(
        (860, 420),
        "Processes of a run and what goes between them",
        {
            "rollout": Box((10, 96, 260, 312), "rollout process", "group"),
            "trainer": Box((590, 96, 260, 312), "trainer process", "group"),
            "cli": Box((330, 10, 200, 50), "tracerl run\nstarts, watches, shows", "key"),
            "server": Box((30, 126, 220, 50), "HTTP server\nSGLang's API"),
            "engine": Box((30, 198, 220, 50), "engine\nFP4 forward, KV cache"),
            "capture": Box((30, 270, 220, 50), "capture\nlow bits of codes and scales"),
            "writer": Box((30, 342, 220, 50), "writer thread\nframes"),
            "loop": Box((610, 126, 220, 50), "loop\ngroups, staleness, steps"),
            "learner": Box((610, 300, 220, 64), "learner\nguided forward, ratio, update"),
            "store": Box((320, 342, 180, 54), "record store process\na ring in shared memory", "store"),
            "log": Box((610, 10, 240, 50), "run directory\nlogs, checkpoints, report", "store"),
        },
        (
            Arrow("server", "engine"),
            Arrow("engine", "capture"),
            Arrow("capture", "writer"),
            Arrow("loop", "learner"),
            Arrow("loop", "server", "prompts", (0, -10)),
            Arrow("server", "loop", "tokens, log-probs, versions, handles", (0, 12)),
            Arrow("writer", "store", "put"),
            Arrow("store", "learner", "borrow,\nthen release", along=0.46),
            Arrow("learner", "server", "weights of v + 1", along=0.45),
            Arrow("loop", "log", shift=(80, 0)),
            Arrow("log", "cli", dashed=True),
            Arrow("cli", "rollout", dashed=True),
            Arrow("cli", "trainer", dashed=True),
        ),
    ),
    "transport": Figure(
        (860, 330),
        "How a frame gets from a rollout to trainers of its node and of another one",
        {
            "a": Box((10, 10, 560, 240), "node A", "group"),
            "b": Box((640, 10, 210, 240), "node B", "group"),
            "engine": Box((30, 50, 150, 54), "rollout-0\nwriter thread"),
            "ring": Box((272, 50, 183, 54), "ring\nsegments in shared memory", "store"),
            "trainer": Box((430, 140, 120, 50), "trainer\nrank 0"),
            "store": Box((240, 140, 150, 50), "store-0", "key"),
            "spill": Box((30, 184, 150, 50), "spillPath\nlocal disk", "store"),
            "other": Box((665, 100, 160, 54), "trainer\nrank 1"),
            "object": Box((240, 272, 330, 48), "object store", "store"),
        },
        (
            Arrow("engine", "ring", "copy, hash"),
            Arrow("engine", "store", "lease, commit", dashed=True),
            Arrow("ring", "store"),
            Arrow("store", "spill"),
            Arrow("trainer", "store", "pin", dashed=True),
            Arrow("ring", "trainer", "read in place"),
            Arrow("store", "object"),
            Arrow("object", "other"),
            Arrow("ring", "other", "HTTP ranges,\nby the store", (0, -6), 0.27),
        ),
    ),
    "operator": Figure(
        (860, 300),
        "The operator: a shell that talks to the cluster around a core that decides",
        {
            "shell": Box((200, 10, 400, 280), "shell: tracerl_operator.shell", "group"),
            "core": Box((660, 10, 190, 280), "core: no client", "group"),
            "api": Box((10, 160, 90, 60), "API server", "store"),
            "kopf": Box((220, 44, 150, 54), "kopf\nwatches, in a thread"),
            "cache": Box((440, 44, 140, 54), "cache"),
            "queue": Box((220, 128, 150, 54), "queue of jobs"),
            "worker": Box((440, 170, 140, 54), "8 workers"),
            "lease": Box((220, 226, 150, 50), "Lease\nlets the queue out"),
            "reconcile": Box((675, 120, 160, 60), "reconcile\n(job, observed, now)", "key"),
        },
        (
            Arrow("api", "kopf", "watch, list", along=0.36),
            Arrow("kopf", "cache"),
            Arrow("kopf", "queue"),
            Arrow("lease", "queue"),
            Arrow("queue", "worker"),
            Arrow("cache", "worker"),
            Arrow("worker", "reconcile", shift=(0, -6)),
            Arrow("reconcile", "worker", shift=(0, 8)),
            Arrow("worker", "api", "apply,\ndelete,\nstatus", along=0.855),
        ),
    ),
    "block": Figure(
        (860, 190),
        "What becomes of a block of 16 values, and what of it is recorded",
        {
            "values": Box((10, 60, 130, 54), "16 values\nBF16 or FP32"),
            "largest": Box((200, 10, 100, 50), "amax"),
            "scale": Box((420, 10, 140, 50), "block scale\nE4M3"),
            "codes": Box((420, 110, 140, 54), "16 codes\nE2M1"),
            "scale_bits": Box((690, 10, 160, 50), "low bits of the scale\nscaleBits, say 3", "key"),
            "code_bits": Box((690, 110, 160, 54), "low bits of the codes\ncodeBits each, say 1", "key"),
        },
        (
            Arrow("values", "largest"),
            Arrow("largest", "scale", "to nearest"),
            Arrow("values", "codes", "by the scale, to nearest"),
            Arrow("scale", "codes"),
            Arrow("scale", "scale_bits", "recorded"),
            Arrow("codes", "code_bits", "recorded"),
        ),
    ),
    "records": Figure(
        (860, 270),
        "From the forward passes of a trajectory to the rows that its trainer follows",
        {
            "rollout": Box((10, 10, 840, 96), "rollout: a row for each token that is taken in", "group"),
            "trainer": Box((10, 170, 840, 90), "trainer: one record of it", "group"),
            "prompt": Box((30, 42, 180, 50), "prefix\nshared by samples", "store"),
            "first": Box((230, 42, 160, 50), "frame\nrows under version 7"),
            "second": Box((410, 42, 420, 50), "frame\nrows under version 8"),
            "before": Box((30, 200, 180, 46), "rows of the prompt", "key"),
            "answer": Box((230, 200, 160, 46), "rows of the response", "key"),
            "rest": Box((410, 200, 420, 46), "rows of the response", "key"),
        },
        (
            Arrow("prompt", "before", "handle", along=0.42),
            Arrow("first", "answer", "handle", along=0.42),
            Arrow("second", "rest", "handle", along=0.42),
        ),
    ),
    "ratio": Figure(
        (860, 250),
        "Four log-probs of a token, and which of them are divided by which",
        {
            "rollout": Box((10, 98, 150, 54), "logp_rollout\nwhich sampled it", "store"),
            "guided": Box((380, 20, 180, 54), "logp_old_guided\nrounds as recorded", "key"),
            "unguided": Box((380, 176, 180, 54), "logp_old_unguided\nrounds to nearest"),
            "new": Box((670, 20, 180, 54), "logp_new_guided\nhas the gradient", "key"),
        },
        (
            Arrow("rollout", "guided", "weight of a token\nof this version"),
            Arrow("rollout", "unguided", "weight of\nan older token"),
            Arrow("guided", "new", "PPO ratio"),
        ),
    ),
    "rounding": _rounding(),
    "gpu-kernels": _gpu(json.loads((RESULTS / "gpu-h200.json").read_text(encoding="utf-8"))),
}


def main() -> None:
    """Write all pictures into the directory given, docs/figures by default."""
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/figures")
    directory.mkdir(parents=True, exist_ok=True)
    for name, figure in FIGURES.items():
        (directory / f"{name}.svg").write_text(figure.svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
