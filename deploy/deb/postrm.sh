#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
set -e

if [ -d /run/systemd/system ] && [ "$1" = remove ]; then
	systemctl --system daemon-reload >/dev/null || true
fi
if [ "$1" = purge ]; then
	deb-systemd-helper purge ebb-agent.service >/dev/null || true
	# What `ebb cleanup` would remove: without its pin nothing of it stays in the kernel.
	rm -rf /sys/fs/bpf/ebb /run/ebb /var/lib/ebb
	rmdir --ignore-fail-on-non-empty /etc/ebb 2>/dev/null || true
fi
