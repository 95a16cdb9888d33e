"""The hardware threads of a core map in SVG: how each state is drawn, and the key that explains it.

Each state has a shape or pattern of its own besides its colour: square where one VM owns the thread, round
where VMs share it, dashed and in small letters where its owner keeps it idle, pale, round at its corners and
with a question mark where it is kept for a VM that waits; without a VM empty (free),
dotted (isolated), hatched (reserved) or crossed (in use outside of kvplace). A dark corner marks the threads
where QEMU's own threads run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from xml.etree.ElementTree import Element

from kvplace.core.drawing.core_map import MEANINGS, CoreMap, Thread, ThreadState
from kvplace.core.drawing.occupancy import FaultKind
from kvplace.core.drawing.svg_blocks import Block, number, shortened, tag, text_width
from kvplace.core.scalars import CpuId

SIDE = 28.0
"""Width and height of a thread with the space around it."""

_SIZE = 11.0
_LETTERS = 7
_GLYPHS = {ThreadState.ISOLATED: ":", ThreadState.RESERVED: "#", ThreadState.FOREIGN: "%"}


def patterns(defs: Element) -> None:
    """Add the patterns of the states without a VM."""
    for state, lines in (
        (ThreadState.RESERVED, ["M0 6L6 0"]),
        (ThreadState.FOREIGN, ["M0 6L6 0", "M0 0L6 6"]),
    ):
        pattern = _pattern(defs, state)
        for line in lines:
            tag(pattern, "path", class_="hatch", d=line)
    tag(_pattern(defs, ThreadState.ISOLATED), "circle", class_="dot", cx=3, cy=3, r=1.2)


def colour_of(thread: Thread, colours: Mapping[str, str]) -> str:
    """Choose the class of a thread's colour: that of its VM, or none where there is not exactly one."""
    return colours[thread.vms[0]] if len(thread.vms) == 1 else "plain"


def thread_mark(thread: Thread) -> str:
    """Write a thread's VM, or how many share it, then `!` for a fault and the letters of strays."""
    if thread.state is ThreadState.SHARED and len(thread.vms) > 1:
        mark = f"×{len(thread.vms)}"
    else:
        mark = _GLYPHS.get(thread.state) or "/".join(thread.vms)
    if thread.state is ThreadState.IDLE:
        mark = mark.lower()
    if thread.state is ThreadState.KEPT:
        mark += "?"
    if thread.fault is not None:
        mark += "!"
    mark += "/".join(thread.strays)
    return mark if len(mark) <= _LETTERS else mark[: _LETTERS - 1] + "…"


def paint_thread(
    parent: Element,
    state: ThreadState,
    colour: str,
    mark: str,
    x: float,
    y: float,
    *,
    cpu: str,
    fault: bool = False,
    qemu: bool = False,
) -> None:
    """Draw a thread with its CPU number above its mark; either alone is in the middle."""
    side = SIDE - 2
    ground: dict[str, str | float] = {"class": colour, "x": x + 1, "y": y + 1, "width": side, "height": side}
    match state:
        case ThreadState.SHARED:
            ground |= {"rx": side / 2}
        case ThreadState.IDLE:
            ground |= {"class": f"{colour} idle", "rx": 3, "fill-opacity": 0.45}
        case ThreadState.KEPT:
            ground |= {"class": f"{colour} idle", "rx": 9, "fill-opacity": 0.2}
        case _:
            ground |= {"rx": 3}
    tag(parent, "rect", **ground)
    if state in _GLYPHS:
        tag(
            parent, "rect", fill=f"url(#kvplace-{state.value})",
            x=x + 1.5, y=y + 1.5, width=side - 1, height=side - 1, rx=3,
        )  # fmt: skip
    if qemu:
        corner = f"M{number(x + SIDE - 8.5)} {number(y + 1)}H{number(x + SIDE - 1)}V{number(y + 8.5)}Z"
        tag(parent, "path", class_="qemu", d=corner)
    if fault:
        tag(parent, "rect", class_="fault", x=x + 2, y=y + 2, width=side - 2, height=side - 2, rx=3)
    middle = x + SIDE / 2
    if mark:
        if cpu:
            tag(parent, "text", cpu, class_="middle", x=middle, y=y + 10.5, font_size=7.5)
        size = min(12.5, 23 / text_width(mark, 1))
        down = 22.0 if cpu else 18.5
        tag(parent, "text", mark, class_="middle strong", x=middle, y=y + down, font_size=size)
    elif cpu:
        tag(parent, "text", cpu, class_="middle muted", x=middle, y=y + 17, font_size=8.5)


def key_of(drawing: CoreMap, colours: Mapping[str, str], width: float) -> Block:
    """Explain the states that a map shows, each by the first thread that has it."""
    first: dict[tuple[ThreadState, bool], Thread] = {}
    for one in drawing.threads:
        first.setdefault((one.state, len(one.vms) > 1), _without_others(one))
    entries = [
        (thread, thread_mark(thread), _meaning(thread))
        for state in MEANINGS
        for several in (False, True)
        if (thread := first.get((state, several))) is not None
    ]
    free = Thread(CpuId(0), ThreadState.FREE)
    if any(one.qemu for one in drawing.threads):
        entries.append((replace(free, qemu=("",)), "", "QEMU's own threads run here"))
    if any(one.fault for one in drawing.threads):
        entries.append((replace(free, fault=FaultKind.DRIFT), "!", "conflict or drift, explained below"))
    places = list(_places([words for *_, words in entries], width))

    def draw(parent: Element, x: float, y: float, _width: float, _height: float) -> None:
        for (thread, mark, words), (left, line) in zip(entries, places, strict=True):
            top = y + line * (SIDE + 6)
            paint_thread(
                parent, thread.state, colour_of(thread, colours), mark, x + left, top,
                cpu="", fault=thread.fault is not None, qemu=bool(thread.qemu),
            )  # fmt: skip
            words = shortened(words, _SIZE, width - SIDE - 6)
            tag(parent, "text", words, x=x + left + SIDE + 6, y=top + 18, font_size=_SIZE)

    return Block(width, (places[-1][1] + 1) * (SIDE + 6) - 6, draw)


def _without_others(thread: Thread) -> Thread:
    """Keep the state of a thread: each of the rest has an entry of its own in the key."""
    alone = thread.state is ThreadState.EMULATOR
    return replace(thread, strays=(), fault=None, qemu=thread.qemu if alone else ())


def _meaning(thread: Thread) -> str:
    if thread.state is ThreadState.SHARED and len(thread.vms) > 1:
        return f"shared by {len(thread.vms)} VMs"
    return MEANINGS[thread.state].format("/".join(thread.vms))


def _places(texts: list[str], width: float) -> Iterator[tuple[float, int]]:
    left, line = 0.0, 0
    for text in texts:
        wide = SIDE + 6 + text_width(text, _SIZE) + 18
        if left and left + wide > width + 18:
            left, line = 0.0, line + 1
        yield left, line
        left += wide


def _pattern(defs: Element, state: ThreadState) -> Element:
    pattern = tag(
        defs, "pattern", id=f"kvplace-{state.value}", width=6, height=6, patternUnits="userSpaceOnUse"
    )
    tag(pattern, "rect", class_="hatch-ground", width=6, height=6)
    return pattern
