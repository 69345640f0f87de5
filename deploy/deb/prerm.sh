#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
set -e

[ "$1" = remove ] || exit 0
if [ -d /run/systemd/system ]; then
	deb-systemd-invoke stop ebb-agent.service >/dev/null || true
fi
# Without the program they stop as they did before: a failure of the drain is ignored.
for file in /etc/systemd/system/*.service.d/50-ebb.conf; do
	if [ -e "$file" ]; then
		unit=${file%.d/50-ebb.conf}
		echo "ebb: ${unit##*/} has a drop-in of ebb; to remove it: rm $file && systemctl daemon-reload"
	fi
done
