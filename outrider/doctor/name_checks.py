"""Checks of names that whoever deploys has to choose: images, and what stands for another name in the documentation."""

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final

from outrider.doctor.finding import Finding, State, listed
from outrider.doctor.overlay import Overlay, label

_EXAMPLE_HOST: Final = re.compile(r"(?<![\w.-])(?:[\w-]+\.)*(?:example\.(?:com|net|org)|[\w-]+\.example)(?![\w.-]*\w)")
"""Names that RFC 2606 reserves for documentation, so that they stand for another one."""


def check_images(overlay: Overlay) -> list[Finding]:
    """Check that each image has a name of its own, and a fixed tag."""
    images = defaultdict(set)
    pulled = set()
    for template in overlay.pod_templates():
        for container in template.containers:
            images[container["image"]].add(template.owner)
            if container.get("imagePullPolicy", "") not in ("Never", "IfNotPresent"):
                pulled.add(container["image"])
    found = []
    for image, who in sorted(images.items()):
        users = listed(who)
        if _EXAMPLE_HOST.search(image):
            found.append(
                Finding("images", State.FAILS, f"{image} of {users} is a placeholder", "name yours in `images`")
            )
        elif not _has_registry(image) and image not in pulled:
            text = f"{image} of {users} names no registry: it must lie on each node, or on Docker Hub"
            found.append(Finding("images", State.ADVICE, text, "load it on every node, or name a registry"))
        elif _floats(image):
            found.append(Finding("images", State.ADVICE, f"{image} of {users} has no fixed tag", "name a version"))
    if images and not found:
        found.append(
            Finding(
                "images",
                State.HOLDS,
                f"{len(images)} named, with fixed tags; whether they can be pulled is not checked",
            )
        )
    return found


def check_placeholders(overlay: Overlay) -> list[Finding]:
    """Check that nothing but images has a name of a documentation's domain: those are checked for themselves."""
    found = []
    for item in overlay.objects:
        if item["kind"] == "CustomResourceDefinition":
            continue
        for path, text in _strings(item):
            # A whole file in a ConfigMap may have examples in its comments.
            if path.endswith(".image") or "\n" in text or not (match := _EXAMPLE_HOST.search(text)):
                continue
            place = f"{label(item)} has {match.group()} at {path.removeprefix('.')}"
            found.append(Finding("placeholders", State.FAILS, place, "name yours in the overlay"))
    return found or [Finding("placeholders", State.HOLDS, "no name of a domain for examples")]


def _has_registry(image: str) -> bool:
    first, slash, _ = image.partition("/")
    return bool(slash) and ("." in first or ":" in first or first == "localhost")


def _floats(image: str) -> bool:
    if "@" in image:
        return False
    _, colon, tag = image.rpartition("/")[2].partition(":")
    return not colon or tag == "latest"


def _strings(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield all strings within an object, with the path to each."""
    if isinstance(node, str):
        yield path, node
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from _strings(value, f"{path}.{key}")
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _strings(value, f"{path}[{index}]")
