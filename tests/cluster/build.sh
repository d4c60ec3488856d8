#!/usr/bin/env bash
# Puts the programs of a Kubernetes cluster and the root file system of its node into a folder: build.sh FOLDER
#
# FOLDER/bin has kube-apiserver, kube-controller-manager, kube-scheduler, kubelet, kube-proxy and kubectl, all compiled
# from Debian 12's source package `kubernetes` (1.20, with all its modules in vendor/) with Debian's Go, which is unpacked
# beside it. FOLDER/node is a Debian made by mmdebstrap, with etcd, containerd, runc, the CNI plug-ins, iptables and dnsmasq.
# Nothing is installed. apt fetches everything by a configuration of its own, made of the system's: the same sources,
# proxies and keys, and source packages too. So everything is verified as apt verifies it, from the signature of the
# release to each file's hash.
#
# It takes 10 minutes on 2 cores, 2 GB of memory, and 5 GB of disk of which 1 GB remains. What an interrupted run has
# done the next one takes up; once everything is there it does nothing.
set -euo pipefail

readonly SOURCE=kubernetes RELEASE=1.20 GO=golang-1.19
readonly PROGRAMS=(kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl)
readonly NODE_PACKAGES=etcd-server,containerd,runc,containernetworking-plugins,iptables,conntrack,iproute2,dnsmasq-base
readonly FOLDER=$(realpath --canonicalize-missing "${1:?usage: build.sh FOLDER}")
readonly WORK=$FOLDER/build
readonly TREE=$WORK/go/src/k8s.io/kubernetes
export LC_ALL=C.UTF-8

main() {
  [[ -e $FOLDER/ready && $FOLDER/ready -nt $0 ]] && return
  check_system
  mkdir -p "$WORK/tmp" "$FOLDER/bin"
  configure_apt
  make_node
  fetch
  unpack
  generate
  compile
  rm -rf "$WORK"
  touch "$FOLDER/ready"
  say "ready in $FOLDER"
}

say() { echo "cluster: $*" >&2; }

die() {
  say "$*"
  exit 1
}

check_system() {
  local program
  [[ $(. /etc/os-release && echo "${ID:-} ${VERSION_ID:-}") == "debian 12" ]] ||
    die "builds on Debian 12 only: other releases have no source package '$SOURCE' with its modules, or another one"
  # dpkg-source is part of dpkg-dev, which brings the programs that it calls.
  for program in apt-get dpkg-deb dpkg-source patch xz; do
    command -v "$program" >/dev/null || die "needs '$program': install the package dpkg-dev"
  done
  command -v mmdebstrap >/dev/null || die "needs 'mmdebstrap': install the package of this name"
  [[ $(id -u) == 0 ]] || die "must be root, like the node that it builds"
}

# Makes the node's root file system, in one step: it is there, or it is not.
make_node() {
  [[ -e $FOLDER/node ]] && return
  say "making the node's root file system"
  # As the lists were fetched, but of Debian alone.
  grep '^Acquire::' "$WORK/apt/apt.conf" >"$WORK/node.conf"
  apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' 'Origin: Debian' |
    sort -u >"$WORK/node.list"
  rm -rf "$WORK/node"
  # In a mount namespace, so that an interrupted run leaves no mount behind. Without what only people read.
  env -u APT_CONFIG unshare --mount mmdebstrap --quiet --mode=root --variant=minbase --format=directory \
    --include="$NODE_PACKAGES" --aptopt="$WORK/node.conf" --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/man/*' \
    bookworm "$WORK/node" "$WORK/node.list"
  rm -f "$WORK"/node/etc/apt/apt.conf.d/99mmdebstrap
  mv "$WORK/node" "$FOLDER/node"
}

# Downloads the packages: the debs of Go, and what the source package consists of.
fetch() {
  [[ -e $WORK/fetched ]] && return
  local version
  say "fetching Debian's $SOURCE and $GO"
  version=$(apt-cache showsrc --only-source "$SOURCE" 2>/dev/null | sed -n 's/^Version: //p' | sort -V | tail -1)
  [[ -n $version ]] || die "apt finds no source package '$SOURCE': do its sources name Debian's main component?"
  # Debian writes 1.20.5+really1.20.2-1 for an upload that went back to 1.20.2.
  local upstream=${version##*really}
  upstream=${upstream%%[-+]*}
  [[ $upstream == "$RELEASE".* ]] || die "Debian's $SOURCE is $version here, and not $RELEASE"
  rm -rf "$WORK/packages"
  mkdir "$WORK/packages"
  (
    cd "$WORK/packages"
    apt-get --quiet=2 source --download-only "$SOURCE=$version"
    apt-get --quiet=2 download "$GO-go" "$GO-src"
  )
  echo "$upstream" >"$WORK/fetched"
}

# Gives apt lists and packages of its own, below the work folder, and the system's sources with source packages added.
configure_apt() {
  local apt=$WORK/apt file
  local sourcelist sourceparts
  eval "$(apt-config shell sourcelist Dir::Etc::sourcelist/f sourceparts Dir::Etc::sourceparts/d)"
  rm -rf "$apt"
  mkdir -p "$apt"/{sources,lists/partial,cache/archives/partial,parts}
  for file in "$sourcelist" "$sourceparts"/*; do
    [[ -r $file ]] || continue
    case $file in
      *.list) sed -En 's/^\s*deb(-src)?(\s.*)/deb\2\ndeb-src\2/p' "$file" >"$apt/sources/${file##*/}" ;;
      *.sources) sed -E 's/^Types:.*/Types: deb deb-src/I' "$file" >"$apt/sources/${file##*/}" ;;
    esac
  done
  grep -qsr '[^[:space:]]' "$apt/sources" || die "apt has no sources in $sourcelist and $sourceparts"
  # The system's proxies, time limits and certificates; but none of its hooks, which may be for root only.
  {
    apt-config dump | grep '^Acquire::' | grep -v '^Acquire::\(IndexTargets\|Changelogs\)::'
    cat <<EOT
Acquire::Languages "none";
Dir::Etc::main "/dev/null";
Dir::Etc::parts "$apt/parts";
Dir::Etc::sourcelist "/dev/null";
Dir::Etc::sourceparts "$apt/sources";
Dir::State::lists "$apt/lists";
Dir::Cache "$apt/cache";
APT::Sandbox::User "root";
EOT
  } >"$apt/apt.conf"
  export APT_CONFIG=$apt/apt.conf
  # A source of the system that is away, and that none of these comes from, is no reason to stop.
  apt-get --quiet=2 update || say "some lists could not be fetched"
}

unpack() {
  [[ -e $WORK/unpacked ]] && return
  local package
  say "unpacking"
  rm -rf "$WORK/root" "$TREE"
  for package in "$WORK"/packages/*.deb; do
    dpkg-deb --extract "$package" "$WORK/root"
  done
  mkdir -p "${TREE%/*}"
  dpkg-source --no-copy --extract "$WORK/packages/$SOURCE"_*.dsc "$TREE" >"$WORK/unpack.log" 2>&1 ||
    die "the source package cannot be unpacked, see $WORK/unpack.log"
  touch "$WORK/unpacked"
}

# Runs a program with Debian's Go. Nothing of the caller's environment counts, and nothing is fetched: without modules
# Go takes what is in vendor/ below its GOPATH. With them this one finds the go.mod of so old a source wanting.
with_go() {
  local go=$WORK/root/usr/lib/go-${GO#golang-}
  env -i PATH="$go/bin:/usr/bin:/bin" HOME="$WORK" GOROOT="$go" GOPATH="$WORK/go" GOCACHE="$WORK/go-cache" \
    GOTMPDIR="$WORK/tmp" GOENV=off GOPROXY=off GO111MODULE=off CGO_ENABLED=0 nice "$@"
}

# Makes the one generated file that the source lacks, as its Makefile does, which needs more programs for that.
generate() {
  [[ -e $TREE/pkg/generated/openapi/zz_generated.openapi.go ]] && return
  local packages
  say "generating what the sources leave out"
  (
    cd "$TREE"
    packages=$(grep -rl --include='*.go' '^// *+k8s:openapi-gen=' pkg vendor/k8s.io/*/ |
      grep -v '^vendor/k8s.io/\(code-generator\|sample-apiserver\)/' | xargs -n1 dirname | sort -u |
      sed 's|^|k8s.io/kubernetes/|' | paste -sd,)
    with_go go build -o "$WORK/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
    with_go "$WORK/openapi-gen" --logtostderr -i "$packages" \
      -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
      -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$WORK/violations"
  )
}

compile() {
  local upstream package stamp=()
  upstream=$(<"$WORK/fetched")
  # As its own build does it: by its version a server decides which of its APIs have expired.
  for package in k8s.io/kubernetes/vendor/k8s.io/{component-base,client-go/pkg}/version; do
    stamp+=(-X "$package.gitVersion=v$upstream")
    stamp+=(-X "$package.gitMajor=${RELEASE%.*}" -X "$package.gitMinor=${RELEASE#*.}")
  done
  say "compiling, which takes 9 minutes on 2 cores"
  for package in "${PROGRAMS[@]}"; do
    [[ -x $FOLDER/bin/$package ]] && continue
    (
      cd "$TREE"
      with_go go build -trimpath -ldflags "-s -w ${stamp[*]}" -o "$WORK/$package" "./cmd/$package"
    )
    # kubectl has no such flag.
    [[ $package == kubectl || $("$WORK/$package" --version) == "Kubernetes v$upstream" ]] ||
      die "the $package that was built does not run"
    mv "$WORK/$package" "$FOLDER/bin"
  done
}

main
