"""Adds and removes elements in the document's own indentation."""

from __future__ import annotations

from lxml import etree


def indentation_of(root: etree._Element) -> str | None:
    """Return the indentation of the root's children; None when the document has no line breaks."""
    before_first = root.text or ""
    if before_first.strip() or "\n" not in before_first:
        return None
    return before_first.rpartition("\n")[2] or None


def remove(element: etree._Element) -> None:
    """Remove an element from its parent and keep the text that follows it."""
    parent = element.getparent()
    if parent is None:
        return
    if element.tail and element.tail.strip():
        before = element.getprevious()
        if before is None:
            parent.text = (parent.text or "") + element.tail
        else:
            before.tail = (before.tail or "") + element.tail
    parent.remove(element)


def remove_child_of_root(element: etree._Element) -> None:
    """Remove a child of the root together with its line."""
    before, root, tail = element.getprevious(), element.getparent(), element.tail
    remove(element)
    if tail and tail.strip():
        return  # `remove` has kept this text
    if before is not None and not (before.tail or "").strip():
        before.tail = tail
    elif before is None and root is not None and not (root.text or "").strip():
        root.text = tail


def add_to_root(root: etree._Element, element: etree._Element, *, after: etree._Element | None) -> None:
    """Insert an element after `after`, or at the end, on a line of its own where the document has lines."""
    indentation = indentation_of(root)
    anchor = after if after is not None else (root[-1] if len(root) else None)
    if anchor is None:
        root.append(element)
        return
    tail = anchor.tail
    anchor.addnext(element)
    element.tail = tail
    anchor.tail = None if indentation is None else f"\n{indentation}"


def align(root: etree._Element, element: etree._Element) -> None:
    """Indent the content of a child of the root in the document's own way."""
    indentation = indentation_of(root)
    if indentation is not None and len(element):
        etree.indent(element, space=indentation, level=1)
