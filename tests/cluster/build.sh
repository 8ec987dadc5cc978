#!/usr/bin/env bash
# Builds what the cluster tests start, from Go modules, into .cache/cluster/bin: about 5 minutes on two idle cores
# the first time, a second when nothing changed. Needs Go 1.26 or newer.
set -euo pipefail
cd "$(dirname "$0")"
command -v go >/dev/null || {
    echo "make: Go 1.26 or newer is needed to build Kubernetes' API server: install it (https://go.dev/dl) and try again" >&2
    exit 1
}
bin=$PWD/../../.cache/cluster/bin
mkdir -p "$bin"
version=$(awk '$1 == "k8s.io/kubernetes" { print $2 }' tools/kube/go.mod)
IFS=. read -r major minor _ <<<"${version#v}"
package=k8s.io/component-base/version
echo "building etcd, kube-apiserver and kubectl $version"
cd tools/kube
CGO_ENABLED=0 GOFLAGS="-buildvcs=false -mod=readonly -trimpath -modcacherw" go build \
    -ldflags="-s -w -X $package.gitVersion=$version -X $package.gitMajor=$major -X $package.gitMinor=$minor" \
    -o "$bin/kube" .
