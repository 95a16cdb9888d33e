"""A core map as an SVG picture, nested as in lstopo.

Each hardware thread shows its CPU number and the letters of its VM, which the legend names. Each state has a
shape or pattern besides its colour: square where one VM owns the thread, round where VMs share it, dashed and
in small letters where its owner keeps it idle, pale with a question mark where a waiting VM has reserved it.
Without a VM a thread is empty (free), dotted (isolated), hatched (reserved) or crossed (in use outside of
kvplace). A dark corner marks the threads where QEMU's own threads run. A red edge and `!` mark a conflict or
drift.

The picture loads nothing, runs no script and follows the reader's choice of light or dark. It also states
everything in words: in a description for screen readers, and in a title for each thread. Equal maps give
equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from xml.etree.ElementTree import Element, indent, tostring

from kvplace.core.cpuset import format_cpu_list, mask_of
from kvplace.core.drawing.core_map import (
    MEANINGS,
    TITLE,
    CoreBox,
    CoreMap,
    L3Box,
    NodeBox,
    PackageBox,
    Thread,
    ThreadState,
    distance_phrases,
)
from kvplace.core.drawing.occupancy import FaultKind, name_of_vm, printable
from kvplace.core.drawing.svg_blocks import (
    COLOURS,
    ROOT,
    Block,
    fixed,
    grid,
    number,
    shortened,
    stack,
    style_sheet,
    tag,
    text_width,
)
from kvplace.core.scalars import CpuId

_GAP = 4.0
_PAD = 8.0
_LINE = 15.0
_SMALL = 10.0
_NAME = 11.5
_MARGIN = 20.0
_ENTRY = 225.0
"""Width of a legend entry."""
_NARROWEST = 660.0
_MOST_NAMES = 4
"""VMs with QEMU on a thread that its title names: the reserved CPUs serve many."""
_MOST_FAULTS = 20
"""Faults written below the map; the description has all of them."""


def svg_map(drawing: CoreMap) -> str:
    """Write a core map as an SVG document in ASCII, which needs no declared encoding."""
    painter = _SvgPainter(drawing)
    body = painter.body()
    width, height = body.width + 2 * _MARGIN, body.height + 2 * _MARGIN
    root = Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "class": ROOT,
            "width": f"{width:.0f}",
            "height": f"{height:.0f}",
            "viewBox": f"0 0 {width:.0f} {height:.0f}",
            "role": "img",
            "aria-labelledby": "kvplace-title kvplace-words",
        },
    )
    tag(root, "title", f"Core map of {printable(drawing.name)}", id="kvplace-title")
    tag(root, "desc", "\n".join(_words(drawing)), id="kvplace-words")
    tag(root, "style", style_sheet())
    patterns(tag(root, "defs"))
    tag(root, "rect", class_="page", width="100%", height="100%")
    body.draw(root, _MARGIN, _MARGIN, body.width, body.height)
    indent(root, " ")
    document: bytes = tostring(root, encoding="us-ascii")
    return document.decode() + "\n"


def _words(drawing: CoreMap) -> Iterator[str]:
    yield f"{printable(drawing.name)}: {drawing.summary}."
    for package in drawing.packages:
        nodes = ", ".join(f"NUMA node {node.id}{_part(node)}" for node in package.nodes)
        yield f"Socket {package.id}: {nodes}."
    if distances := distance_phrases(drawing):
        yield f"{TITLE} {', '.join(distances)}."
    for entry in drawing.legend:
        cpus = format_cpu_list(entry.claim.cpus | entry.claim.owned)
        words = f"{entry.label} is {name_of_vm(entry.claim)}, policy {entry.claim.policy.value}, CPUs {cpus}"
        yield f"{', '.join(filter(None, (words, entry.beside_cpus)))}."
    for fault in drawing.faults:
        yield f"{fault.kind.value.capitalize()}: {fault.sentence}."


class _SvgPainter:
    def __init__(self, drawing: CoreMap) -> None:
        self._drawing = drawing
        self._names = {entry.label: name_of_vm(entry.claim) for entry in drawing.legend}
        self._colours = {label: f"vm{index % COLOURS}" for index, label in enumerate(self._names)}

    def body(self) -> Block:
        drawing = self._drawing
        machine = grid([self._package(package) for package in drawing.packages], 12, 1.7)
        width = max(machine.width, _NARROWEST)
        blocks = [self._heading(width), fixed(machine)]
        if drawing.memory_only:
            blocks.append(fixed(grid([self._node(node) for node in drawing.memory_only], 10, 12)))
        blocks.append(key_of(drawing, self._colours, width))
        if drawing.faults:
            blocks.append(self._faults(width))
        if drawing.legend:
            blocks.append(self._legend(width))
        return stack(blocks, 14)

    def _heading(self, width: float) -> Block:
        def draw(parent: Element, x: float, y: float, _width: float, _height: float) -> None:
            title = shortened(printable(self._drawing.name), 18, width)
            tag(parent, "text", title, class_="strong", x=x, y=y + 16, font_size=18)
            for row, line in enumerate(lines):
                tag(parent, "text", line, class_="muted", x=x, y=y + 34 + row * _LINE, font_size=_NAME)

        lines = _wrapped(self._drawing.summary.split(", "), ", ", _NAME, width)
        if distances := distance_phrases(self._drawing):
            lines += _wrapped([f"{TITLE} {distances[0]}", *distances[1:]], ", ", _NAME, width)
        return Block(width, 24 + len(lines) * _LINE, draw)

    def _package(self, package: PackageBox) -> Block:
        nodes = grid([self._node(node) for node in package.nodes], 10, 2.0)
        return _frame("package", package.id, [f"socket {package.id}"], nodes)

    def _node(self, node: NodeBox) -> Block:
        captions = [f"NUMA {node.id}{_part(node)}", *node.free_resources]
        if not node.l3_groups:
            return _frame("numa", node.id, [captions[0], "memory only", *captions[1:]], stack([], 0))
        return _frame("numa", node.id, captions, grid([self._l3(l3) for l3 in node.l3_groups], _PAD, 2.2))

    def _l3(self, l3: L3Box) -> Block:
        cores = fixed(grid([self._core(core) for core in l3.cores], _GAP, 3.2))
        return _frame("l3", l3.index, [f"L3 {l3.index}{_part(l3)}"], cores)

    def _core(self, core: CoreBox) -> Block:
        columns = 1 if len(core.threads) < 3 else 2
        rows = -(-len(core.threads) // columns)
        width, height = columns * SIDE + 4, rows * SIDE + 4

        def draw(parent: Element, x: float, y: float, _width: float, _height: float) -> None:
            group = tag(
                parent, "g", data_core=format_cpu_list(mask_of(thread.cpu for thread in core.threads))
            )
            dashed = {"stroke_dasharray": "3 2"} if core.part else {}
            tag(group, "rect", class_="core", x=x, y=y, width=width, height=height, rx=4, **dashed)
            for place, thread in enumerate(core.threads):
                left, top = place % columns, place // columns
                self._thread(group, thread, x + 2 + left * SIDE, y + 2 + top * SIDE)

        return Block(width, height, draw)

    def _thread(self, parent: Element, thread: Thread, x: float, y: float) -> None:
        group = tag(parent, "g", data_cpu=thread.cpu, data_state=thread.state.value)
        if thread.vms:
            group.set("data-vms", " ".join(thread.vms))
        if thread.fault is not None:
            group.set("data-fault", thread.fault.value)
        tag(group, "title", self._sentence(thread))
        paint_thread(
            group, thread.state, colour_of(thread, self._colours), thread_mark(thread), x, y,
            cpu=str(thread.cpu), fault=thread.fault is not None, qemu=bool(thread.qemu),
        )  # fmt: skip

    def _sentence(self, thread: Thread) -> str:
        words = [f"CPU {thread.cpu}: {thread.state.value}"]
        if thread.vms:
            relation = "for" if thread.state is ThreadState.KEPT else "by"
            words.append(f"{relation} " + ", ".join(f"{label} {self._names[label]}" for label in thread.vms))
        if thread.strays:
            strays = ", ".join(f"{label} {self._names[label]}" for label in thread.strays)
            words.append(f"with threads of {strays}")
        if thread.qemu:
            few = len(thread.qemu) <= _MOST_NAMES
            vms = [f"{label} {self._names[label]}" for label in thread.qemu] if few else []
            words.append(f"with QEMU's own threads of {', '.join(vms) or f'{len(thread.qemu)} VMs'}")
        if thread.fault is not None:
            words.append(f"({thread.fault.value})")
        return " ".join(words)

    def _faults(self, width: float) -> Block:
        faults = self._drawing.faults
        sentences = [f"! {fault.kind.value}: {fault.sentence}" for fault in faults[:_MOST_FAULTS]]
        if len(faults) > _MOST_FAULTS:
            sentences.append(f"! and {len(faults) - _MOST_FAULTS} more")
        lines = [line for sentence in sentences for line in _wrapped(sentence.split(" "), " ", _NAME, width)]

        def draw(parent: Element, x: float, y: float, _width: float, _height: float) -> None:
            for row, line in enumerate(lines):
                tag(parent, "text", line, class_="alarm", x=x, y=y + 11 + row * _LINE, font_size=_NAME)

        return Block(width, len(lines) * _LINE, draw)

    def _legend(self, width: float) -> Block:
        columns = max(1, int((width + _PAD) // (_ENTRY + _PAD)))
        entries = self._drawing.legend
        rows = -(-len(entries) // columns)
        column = (width + _PAD) / columns - _PAD - SIDE - 8
        high = 47 if any(entry.beside_cpus for entry in entries) else 34

        def draw(parent: Element, x: float, y: float, _width: float, _height: float) -> None:
            for place, entry in enumerate(entries):
                left = x + place // rows * ((width + _PAD) / columns)
                top = y + place % rows * high
                claim = entry.claim
                group = tag(parent, "g", data_vm=entry.label)
                state = ThreadState.OWNED if claim.owned else ThreadState.SHARED
                colour = self._colours[entry.label]
                paint_thread(group, state, colour, entry.label, left, top, cpu="")
                words = f"{claim.policy.value} {format_cpu_list(claim.cpus | claim.owned)}"
                said = (f"{entry.label}: {name_of_vm(claim)}", words, entry.beside_cpus)
                tag(group, "title", ", ".join(filter(None, said)))
                for text, size, down, kind in (
                    (name_of_vm(claim), _NAME, 12.0, ""),
                    (words, _SMALL, 25.0, "muted"),
                    (entry.beside_cpus, _SMALL, 38.0, "muted"),
                ):
                    if not text:
                        continue
                    tag(
                        group, "text", shortened(text, size, column),
                        class_=kind, x=left + SIDE + 8, y=top + down, font_size=size,
                    )  # fmt: skip

        return Block(width, rows * high - 6, draw)


def _frame(level: str, number: int, captions: list[str], body: Block) -> Block:
    rows = _wrapped(captions, "   ", _SMALL, max(body.width, 110.0))
    title = len(rows) * 14.0 + 2
    width = max(body.width, *(text_width(row, _SMALL) for row in rows)) + 2 * _PAD
    height = title + body.height + 2 * _PAD - (2 if body.height else 6)

    def draw(parent: Element, x: float, y: float, wide: float, tall: float) -> None:
        group = tag(parent, "g")
        group.set(f"data-{level}", str(number))
        tag(group, "rect", class_=level, x=x, y=y, width=wide, height=tall, rx=6)
        for line, row in enumerate(rows):
            first, rest = (captions[0], row[len(captions[0]) :]) if line == 0 else ("", row)
            top = y + _PAD + 9 + line * 14
            if first:
                tag(group, "text", first, class_="strong", x=x + _PAD, y=top, font_size=_SMALL)
            if rest.strip():
                left = x + _PAD + text_width(row[: len(row) - len(rest.lstrip())], _SMALL)
                tag(group, "text", rest.strip(), x=left, y=top, font_size=_SMALL)
        top = _PAD + title
        body.draw(group, x + _PAD, y + top, wide - 2 * _PAD, tall - top - _PAD)

    return Block(width, height, draw)


def _part(box: NodeBox | L3Box) -> str:
    return " (part)" if box.part else ""


def _wrapped(words: list[str], separator: str, size: float, width: float) -> list[str]:
    """Join words to lines of at most a width; a longer word has a line of its own."""
    lines = [words[0]]
    for word in words[1:]:
        longer = lines[-1] + separator + word
        if text_width(longer, size) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


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
    """Choose the class of a thread's colour: its VM's, or none where there is not exactly one VM."""
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
    """Keep only the state of a thread: its other marks have their own entries in the key."""
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
