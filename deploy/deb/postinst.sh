#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
set -e

[ "$1" = configure ] || exit 0
# Its members may ask the agent, and tell it to drain.
getent group ebb >/dev/null || groupadd --system ebb
# The agent reads what others write in a process of this user.
getent passwd ebb-front >/dev/null ||
	useradd --system --user-group --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin ebb-front

deb-systemd-helper unmask ebb-agent.service >/dev/null || true
if deb-systemd-helper --quiet was-enabled ebb-agent.service; then
	deb-systemd-helper enable ebb-agent.service >/dev/null || true
else
	deb-systemd-helper update-state ebb-agent.service >/dev/null || true
fi
if [ -d /run/systemd/system ]; then
	systemctl --system daemon-reload >/dev/null || true
	# A restart cuts nothing: rules, counts and deadlines are in the kernel, relays have units of their own.
	if [ -n "$2" ]; then
		deb-systemd-invoke restart ebb-agent.service >/dev/null || true
	else
		deb-systemd-invoke start ebb-agent.service >/dev/null || true
	fi
fi
