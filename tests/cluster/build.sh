#!/usr/bin/env bash
# Builds what the cluster tests start, from pinned Go modules, into .cache/cluster (or $TRACERL_CLUSTER_CACHE): bin/ and
# charts/. Arguments name the tools, default: kube containerd helm jobset (and kueue for the full run). On two idle
# cores about 9 minutes the first time, 10 more for kueue; a tool whose go.mod, go.sum, main.go and Go version are
# those of its binary is left as it is, without Go.
# Helm lies in Kubernetes' module (tools/kube), so that what both have in common is compiled once.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=${TRACERL_CLUSTER_CACHE:-$here/../../.cache/cluster}
mkdir -p "$cache/bin" "$cache/charts"
cache=$(cd "$cache" && pwd)
cd "$here"
# No debugger comes here, and the compiler may take memory for time.
export CGO_ENABLED=0 GOFLAGS="-buildvcs=false -mod=readonly -trimpath -modcacherw -gcflags=all=-dwarf=false" GOGC=${GOGC:-400}

# stale TOOL SOURCES RECIPE BINARY...: whether the binaries are not those of the tool's sources and recipe
stale() {
    local stamp=$cache/bin/.$1.stamp one
    source=$({ cat "$2"/go.mod "$2"/go.sum && { cat "$2"/*.go 2>/dev/null || true; } && echo "$GOFLAGS $3"; } | sha256sum)
    toolchain=$(go env GOVERSION 2>/dev/null || true)
    for one in "${@:4}"; do [ -x "$cache/bin/$one" ] || return 0; done
    [ -f "$stamp" ] || return 0
    [ "$(sed -n 1p "$stamp")" = "$source" ] || return 0
    [ -n "$toolchain" ] && [ "$(sed -n 2p "$stamp")" != "$toolchain" ]
}

# version SOURCES MODULE
version() { awk -v module="$2" '$1 == module || $2 == module { for (i = 1; i <= NF; i++) if ($i ~ /^v[0-9]/) { print $i; exit } }' "$1"/go.mod; }

# build TOOL SOURCES MODULE FLAGS BINARY=PACKAGE...
build() {
    local tool=$1 sources=tools/$2 module=$3 flags=$4 pair
    shift 4
    stale "$tool" "$sources" "$flags $*" "${@%%=*}" || return 0
    [ -n "$toolchain" ] || {
        echo "make: Go 1.26 or newer is needed to build $tool for the cluster tests: install it (https://go.dev/dl) and try again" >&2
        exit 1
    }
    rm -f "$cache/bin/.$tool.stamp"
    for pair in "$@"; do
        echo "$(date +%H:%M:%S) building ${pair%%=*} $(version "$sources" "$module")"
        (cd "$sources" && go build -ldflags="-s -w $flags" -o "$cache/bin/${pair%%=*}" "${pair#*=}")
    done
    # The module of a controller holds its chart too, which helm installs.
    local directory
    directory=$(cd "$sources" && go list -m -f '{{.Dir}}' "$module")
    if [ -d "$directory/charts/$tool" ]; then
        rm -rf "$cache/charts/$tool"
        cp -r "$directory/charts/$tool" "$cache/charts/$tool"
        chmod -R u+w "$cache/charts/$tool"
    fi
    printf '%s\n%s\n' "$source" "$toolchain" >"$cache/bin/.$tool.stamp"
}

kubernetes=$(version tools/kube k8s.io/kubernetes)
IFS=. read -r major minor _ <<<"${kubernetes#v}"
package=k8s.io/component-base/version
[ $# -gt 0 ] || set -- kube containerd helm jobset
for one in "$@"; do
    case $one in
    kube)
        build kube kube k8s.io/kubernetes \
            "-X $package.gitVersion=$kubernetes -X $package.gitMajor=$major -X $package.gitMinor=$minor" kube=.
        ;;
    containerd)
        commands=github.com/containerd/containerd/v2/cmd
        build containerd containerd github.com/containerd/containerd/v2 "" containerd=$commands/containerd \
            containerd-shim-runc-v2=$commands/containerd-shim-runc-v2 ctr=$commands/ctr
        ;;
    helm) build helm kube helm.sh/helm/v3 "" helm=helm.sh/helm/v3/cmd/helm ;;
    jobset) build jobset jobset sigs.k8s.io/jobset "" jobset=sigs.k8s.io/jobset ;;
    kueue) build kueue kueue sigs.k8s.io/kueue "" kueue=sigs.k8s.io/kueue/cmd/kueue ;;
    *)
        echo "build.sh: unknown tool $one: write kube, containerd, helm, jobset or kueue" >&2
        exit 2
        ;;
    esac
done
