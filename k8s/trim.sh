#!/bin/sh
# Takes out of an image what no service runs; the Dockerfile runs it in the stages that images are copied from.
#
#   trim.sh root [COMPILER]           of Debian and its Python: pip and what packages are built with, tests, headers, setuid bits;
#                                     services run as the user that it adds
#   trim.sh environment [COMPILER]    of /opt/outrider: tests and headers of PyTorch
#
# With COMPILER not empty headers stay.
set -eu
compiler=${2:-}

# Files get other times in an image. Byte code that is checked against them would be made anew at each start, since nothing
# can be written.
compile() {
  find "$1" -name __pycache__ -prune -exec rm -rf {} +
  # Packages have files for other versions of Python, which this one cannot compile.
  PYTHONDONTWRITEBYTECODE=1 python -m compileall -qq -j 0 --invalidation-mode unchecked-hash "$1" || true
}

trim_root() {
  stdlib=$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
  # Debian's Python has pip as packages, Docker's as files.
  dpkg --purge python3-pip python3-setuptools python3-wheel python3-pkg-resources python3-distutils python3-lib2to3 >/dev/null 2>&1
  rm -rf "$stdlib"/site-packages/* /usr/local/bin/pip* /usr/local/bin/idle* /usr/local/bin/pydoc* /usr/local/bin/2to3*
  for name in ensurepip idlelib lib2to3 pydoc_data test tkinter turtle.py turtledemo; do
    rm -rf "${stdlib:?}/$name"
  done
  if [ -z "$compiler" ]; then
    rm -rf /usr/include /usr/local/include "$stdlib"/config-*
  fi
  # What installs and checks packages, and reads passwords; the database of packages stays, for scanners.
  rm -rf /usr/lib/*/gconv
  dpkg --purge --force-all $(dpkg-query --show --showformat '${Package}\n' apt libapt-pkg6.0 gpgv debian-archive-keyring \
    libgnutls30 libp11-kit0 libunistring2 libhogweed6 libnettle8 libidn2-0 e2fsprogs libext2fs2 logsave adduser mount \
    debconf perl-base 2>/dev/null) >/dev/null 2>&1
  echo outrider:x:10001: >> /etc/group
  echo outrider:x:10001:10001::/tmp:/usr/sbin/nologin >> /etc/passwd
  find / -xdev -type f -perm /6000 -exec chmod ug-s {} +
  for folder in /var/log /var/cache /var/lib/apt/lists /usr/share/man /usr/share/locale /root; do
    [ ! -d "$folder" ] || find "$folder" -mindepth 1 -delete
  done
  compile "$stdlib"
}

trim_environment() {
  packages=$(/opt/outrider/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  # Nothing is pulled from a hub where there is no model library, and all of Kubernetes' API that is used is loaded at once.
  if [ ! -d "$packages"/torch ]; then
    rm -rf "$packages"/hf_xet*
  fi
  if [ -d "$packages"/kubernetes ]; then
    /opt/outrider/bin/python - <<'END'
import re
import sys
from pathlib import Path

import kubernetes
import outrider.discovery.endpoint_slices
from kubernetes.aio import client

# The client loads each of its classes when it is first used.
for path in Path(outrider.discovery.__file__).parent.glob("*.py"):
    for name in re.findall(r"\bclient\.([A-Z]\w+)", path.read_text()):
        getattr(client, name)
loaded = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
for kind in ("api", "models"):
    for path in Path(kubernetes.__file__).parent.rglob(f"client/{kind}/*.py"):
        if path.name != "__init__.py" and str(path) not in loaded:
            path.unlink()
END
  fi
  rm -rf "$packages"/torch/test "$packages"/torch/bin/test_* "$packages"/torch/bin/*Test "$packages"/torch/bin/protoc*
  if [ -z "$compiler" ]; then
    rm -rf "$packages"/torch/include "$packages"/numpy/_core/include
  fi
  # The embedded model was converted by root, for root.
  chmod -R a+rX /opt/outrider
  compile "$packages"
}

"trim_$1"
