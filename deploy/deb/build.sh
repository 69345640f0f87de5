#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes the Debian package of this tree and prints its path.
#
#	deploy/deb/build.sh [DIRECTORY]		(bin)
set -euo pipefail
cd "$(dirname "$0")/../.."
go=${GO:-go}
target=${1:-bin}

# A tag such as v1.2.0 is version 1.2.0; what comes after it, or before the first one, sorts that way.
if version=$(git describe --tags --match 'v[0-9]*' --dirty 2>/dev/null); then
	version=${version#v}
	version=${version/-/+}
else
	version=0~$(git log -1 --format=%cd --date=format:%Y%m%d%H%M)+g$(git describe --always --dirty)
fi
export VERSION=${version//-/.}
commit=$(git rev-parse HEAD)
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
ARCH=$("$go" env GOARCH)
OUT=$(mktemp -d)
export SOURCE_DATE_EPOCH ARCH OUT
trap 'rm -rf "$OUT"' EXIT

CGO_ENABLED=0 "$go" build -trimpath -buildvcs=false -ldflags "-s -w -X main.version=$VERSION -X main.commit=$commit" -o "$OUT/ebb" ./cmd/ebb
# The program that writes the completions runs here; the one that is packed may be for another machine.
for shell in bash zsh fish; do
	GOARCH='' GOOS='' "$go" run ./cmd/ebb completion "$shell" >"$OUT/$shell"
done
mv "$OUT/bash" "$OUT/ebb.bash"
mv "$OUT/zsh" "$OUT/_ebb"
mv "$OUT/fish" "$OUT/ebb.fish"

mkdir -p "$target"
package=$target/ebb_${VERSION}_$ARCH.deb
nfpm=$(cd tools && "$go" tool -n nfpm)
"$nfpm" package --config deploy/deb/nfpm.yaml --packager deb --target "$package" >&2
echo "$package"
