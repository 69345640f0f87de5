#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs the long versions of the tests and keeps what they print.
#
#	tools/full.sh DIR
set -euo pipefail
dir=$1
go=${GO:-go}
if ((EUID != 0)); then
	echo "full: the long tests need root: run sudo make full" >&2
	exit 1
fi
file=$dir/full-$(uname -r).txt
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
(cd tools && "$go" build -o "$tmp/testsum" ./testsum)
{
	echo "commit   $(git describe --tags --always --dirty)"
	echo "date     $(date -u +%Y-%m-%d)"
	echo "kernel   $(uname -srm)"
	echo "machine  $(nproc) CPUs, $(awk '/^MemTotal/ { printf "%.0f GiB", $2 / 1048576 }' /proc/meminfo)"
	echo "go       $("$go" env GOVERSION)"
	echo
} | tee "$tmp/result"
status=0
# -v keeps the logs of passing tests: they hold the numbers that were measured.
EBB_LONG=1 "$go" test -count 1 -p 1 -timeout 4h -json ./... >"$tmp/events" || status=$?
"$tmp/testsum" -logs <"$tmp/events" | tee -a "$tmp/result" || status=1
mv "$tmp/result" "$file"
echo "full: the results are in $file"
exit "$status"
