#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs every fuzz target of the module for a while.
#
#	tools/fuzz.sh TIME     (of each target, such as 30s)
set -euo pipefail
time=$1
go=${GO:-go}

# `go test -list` prints the targets of a package and then the package.
targets=() found=0
while read -r first second _; do
	case $first in
	Fuzz*) targets+=("$first") ;;
	ok)
		for target in "${targets[@]}"; do
			found=$((found + 1))
			echo "fuzz: $second $target for $time"
			"$go" test -run '^$' -fuzz "^$target\$" -fuzztime "$time" "$second"
		done
		targets=()
		;;
	'?') targets=() ;;
	*)
		echo "fuzz: unexpected line: $first $second" >&2
		exit 1
		;;
	esac
done < <("$go" test -list '^Fuzz' ./... || echo "fail")
if ((found == 0)); then
	echo "fuzz: no target found" >&2
	exit 1
fi
echo "fuzz: $found targets, nothing found"
